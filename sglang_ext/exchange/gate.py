"""Where the model's forward pass and the exchange meet on a GPU.

The forward pass may be a captured graph, so all that it touches here stays where it is for the life
of the process: staging buffers, flags, and the index that says which batch rows are exchanged. In
the forward pass, for each layer group,

    begin_group   wait until the slots hold the answer to the step before: `applied`
    stage         copy q, k and v of each layer to the staging buffer
    end_group     the staging buffer is complete, and the slots have been read: `computed`

and at its end, the host is told when layers were reached.

All of it is queued on a stream beside the layers, and the wait for the next group's slots right
after a group's last attention, so that only an answer that is late holds up the layers.

The exchange, outside the graph, takes `computed`, a flag that is raised in steps that exchange
something, by one forward pass each, and sets `applied` to the number of the step. kernels/gate says
why they are not events. Steps are numbered through all connections, so that `applied` never holds
too much. A step that is planned is one forward pass, and its flags are taken once: were it run
twice, every message after it would be a step late.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from itertools import pairwise
from statistics import median

import torch
from cache_rank_kernels.gate import triton as gate
from cache_rank_kernels.pack import triton as pack
from torch import Tensor

from cache_rank.config import CacheRankConfig
from sglang_ext.exchange.pinned_ring import LETTERS, Inbox


class DeviceGate:
    """Buffers and flags of one inference rank on a GPU.

    Attributes:
        step: number of the last step that exchanges rows.
        staging: per group (max rows, L, Hq + 2 Hkv, D), the up messages.
        computed, applied: (groups,) int64, see the module.
        accepts: (1,) int32 in host memory that the device reads: 0 once answers under way will not
            come, which ends every wait for them.
    """

    def __init__(self, config: CacheRankConfig, steps: Tensor, exchange_index: Tensor) -> None:
        """Read, in every forward pass, two tensors that the caller fills before it.

        Args:
            config: agreed with the cache rank.
            steps: (2,) int64, of `plan_step`.
            exchange_index: (max batch,) int64, the exchange row of each batch row, or -1.
        """
        model, device = config.model, steps.device
        heads = model.query_heads + 2 * model.kv_heads
        self.step = 0
        self.staging = [
            torch.zeros(
                (config.max_rows, len(layers), heads, model.head_dim),
                dtype=model.torch_dtype,
                device=device,
            )
            for layers in config.groups
        ]
        self.computed = torch.zeros(len(config.groups), dtype=torch.int64, device=device)
        self.applied = torch.zeros_like(self.computed)
        self.accepts = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.clock = StepClock(config, device)
        self._steps, self._exchange_index = steps, exchange_index
        self._side_stream = torch.cuda.Stream(device)
        # What is being packed: its memory must not be used again before that is done.
        self._packing: list[Tensor] = []
        self._answered = 0
        self._config = config

    def plan_step(self, exchanges: bool) -> tuple[int, int]:
        """Number a step: what its forward pass waits for, and its number or, if it exchanges
        nothing, 0.
        """
        self.step += exchanges
        return self._answered, self.step if exchanges else 0

    def end_step(self) -> None:
        """The answers to the step are under way: the next step waits for them."""
        self._answered = self.step

    def open(self) -> None:
        """A cache rank is connected."""
        self.clock.forget()  # a wait that a loss ended is none of this connection's
        self.accepts[0] = 1

    def close(self) -> None:
        """No answer will come any more. Safe from any thread."""
        self.accepts[0] = 0
        self._answered = 0

    def begin_forward(self) -> None:
        """The forward pass of a decode step begins."""
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            pack.stamp(self.clock.stamps, 0)
            self._wait_for_slots(0)

    def begin_group(self, group: int) -> None:
        """Let the group's layers wait for their slots."""
        self._join()

    def stage(
        self, group: int, layer_in_group: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Copy one layer's tensors of the exchanged rows: (batch, heads, D) each."""
        layer = self._config.groups[group][layer_in_group]
        self._packing += queries, keys, values
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            pack.pack_layer(
                self.staging[group],
                self._exchange_index[: queries.shape[0]],
                layer_in_group,
                queries,
                keys,
                values,
                self.clock.stamps,
                1 + layer,
            )

    def end_group(self, group: int) -> None:
        """The group's layers have been computed."""
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            gate.raise_flag(self.computed, group, self._steps[1:])
            if group + 1 < len(self._config.groups):
                self._wait_for_slots(group + 1)
            else:
                self.clock.report(self._steps[1:])
        if group + 1 == len(self._config.groups):
            self._join()

    def _wait_for_slots(self, group: int) -> None:
        gate.wait_for(self.applied, group, self._steps[:1], self.accepts)

    def _join(self) -> None:
        """Let the forward pass wait for what has been queued beside it."""
        torch.cuda.current_stream().wait_stream(self._side_stream)
        self._packing.clear()


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
        self._reported = Inbox(self.stamps)
        self._under_way: deque[tuple[int, int]] = deque(maxlen=LETTERS)
        self._before_first = float("inf")

    def report(self, number: Tensor) -> None:
        """Queue that the host gets the stamps of a step, which are complete; see Inbox.post."""
        self._reported.post(number)

    def expect(self, number: int, step: int) -> None:
        """The forward pass of a step, which the gate gave a number, has been queued."""
        self._under_way.append((number, step))

    def forget(self) -> None:
        """Leave out the steps whose stamps have not been read."""
        self._under_way.clear()

    @property
    def newest(self) -> int:
        """Number of the last step whose forward pass is known to have been computed."""
        return self._reported.newest

    def completed(self) -> StepTimes | None:
        """The oldest step whose stamps have arrived."""
        if not self._under_way or self._under_way[0][0] > self._reported.newest:
            return None
        number, step = self._under_way.popleft()
        start, *layers = self._reported.letter(number).tolist()
        return StepTimes(step, start, layers)

    def host_offset(self) -> int:
        """Nanoseconds to add to a stamp to get the host's monotonic clock; stops the device."""
        stamp = torch.zeros(1, dtype=torch.int64, device=self.stamps.device)
        pack.stamp(stamp, 0)
        torch.cuda.current_stream().synchronize()
        return time.monotonic_ns() - int(stamp)

    def waits(self, times: StepTimes) -> list[float]:
        """Seconds that each group of a step waited for its slots.

        Not measured by itself, which would cost kernels: the time from one layer to the next is the
        same within groups, and what the first layer of a group takes longer is the wait.
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
