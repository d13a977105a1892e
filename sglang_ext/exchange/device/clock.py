"""When the layers of a step were reached, by the GPU's own timer."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.pack import triton as pack
from sglang_ext.exchange.pinned_ring import RING_ENTRIES, DeviceToHostRing


@dataclasses.dataclass(slots=True)
class StepTimes:
    """When the layers of a step were reached, in nanoseconds of the GPU's timer.

    Attributes:
        step: its number.
        start: of the forward pass.
        layers: when each sparse layer's attention could begin.
    """

    step: int
    start: int
    layers: list[int]


class StepClock:
    """Timestamps that the staging kernels leave, read a few steps later."""

    def __init__(self, config: CacheRankConfig, device: torch.device) -> None:
        self.stamps = torch.zeros(config.model.layers + 1, dtype=torch.int64, device=device)
        self._first_layers = [layers.start for layers in config.groups[1:]]
        self._others = [layer for layers in config.groups for layer in layers[1:]]
        self._reported = DeviceToHostRing(self.stamps)
        self._under_way: deque[int] = deque(maxlen=RING_ENTRIES)
        self._before_first = float("inf")

    def report(self, number: Tensor) -> None:
        """Queue that the host gets the complete stamps of a step; see `DeviceToHostRing.post`."""
        self._reported.post(number)

    def expect(self, step: int) -> None:
        """Expect the stamps of a step, whose forward pass has been queued."""
        self._under_way.append(step)

    def forget(self) -> None:
        """Leave out the steps whose stamps have not been read."""
        self._under_way.clear()

    @property
    def newest(self) -> int:
        """The last step whose forward pass is known to have been computed."""
        return self._reported.newest

    def completed(self) -> StepTimes | None:
        """Return the times of the oldest step whose stamps have arrived."""
        if not self._under_way or self._under_way[0] > self._reported.newest:
            return None
        step = self._under_way.popleft()
        start, *layers = self._reported.entry(step).tolist()
        return StepTimes(step, start, layers)

    def host_offset(self) -> int:
        """Return the nanoseconds from a stamp to the host's monotonic clock; stops the device."""
        stamp = torch.zeros(1, dtype=torch.int64, device=self.stamps.device)
        pack.stamp(stamp, 0)
        torch.cuda.current_stream().synchronize()
        return time.monotonic_ns() - int(stamp)

    def waits(self, times: StepTimes) -> list[float]:
        """Return the seconds that each group of a step waited for its slots.

        A wait is not measured by itself, which would cost kernels. The time from one layer to the
        next is the same within groups; what the first layer of a group takes longer is the wait.
        """
        layers = times.layers
        before_first = layers[0] - times.start
        self._before_first = min(self._before_first, before_first)
        steps = [after - before for before, after in pairwise(layers)]
        within = [steps[layer - 1] for layer in self._others]
        usual = median(within) if within else min(steps, default=0)
        waits = [before_first - self._before_first]
        waits += [steps[layer - 1] - usual for layer in self._first_layers]
        return [max(0.0, wait) * 1e-9 for wait in waits]
