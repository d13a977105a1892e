"""Where the forward pass and the exchange meet on a GPU.

The forward pass may be a captured graph, so all that it touches here stays where it is for the life
of the process: staging buffers, flags, and the index that says which batch rows are exchanged. In
the forward pass, for each layer group,

    stage_hidden  copies what enters the group to the staging buffer, if queries are forecast
    enter_group   waits until the slots hold the answer that the group needs: `applied`
    stage         copies q, k and v of each layer to the staging buffer
    leave_group   the slots have been read

and at its end, the host is told when layers were reached. When a message is complete, `computed`
says so: behind a group's last attention, or with the hidden state that follows it.

All of it is queued on a stream beside the layers. The wait for a group's slots is queued as early
as nothing else must come first, so that only an answer that is late holds up the layers.

The transfers, outside the graph, take `computed`, a flag that is raised in steps that exchange
something, by one forward pass each, and set `applied` to the number of the step. kernels/gate says
why they are not events. Steps are numbered through all connections, so that `applied` never holds
too much. A step that is planned is one forward pass, and its flags are taken once: were it run
twice, every message after it would be a step late.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.gate import triton as gate
from cache_rank.kernels.pack import triton as pack
from cache_rank.protocol import UpMessage, up_sizes
from cache_rank.schedule import index_by_hidden, index_by_kv
from sglang_ext.two_ranks.exchange.base import Gate
from sglang_ext.two_ranks.exchange.pinned_ring import RING_ENTRIES, DeviceToHostRing


@dataclasses.dataclass(slots=True)
class StepTimes:
    """When the layers of a step were reached, in nanoseconds of the GPU's timer.

    Attributes:
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

    def completed(self) -> StepTimes | None:
        """Return the times of the oldest step whose stamps have arrived."""
        if not self._under_way or self._under_way[0] > self._reported.newest:
            return None
        step = self._under_way.popleft()
        start, *layers = self._reported.entry(step).tolist()
        return StepTimes(step, start, layers)

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


class DeviceGate(Gate):
    """Buffers and flags of one inference rank on a GPU.

    Attributes:
        staging: each message to the cache rank, for `max_rows` requests.
        computed: (messages,) int64, see the module.
        applied: (groups,) int64, likewise.
        accepts: (1,) int32 in host memory that the device reads: 0 once answers under way will not
            come, which ends every wait for them.
        clock: when the layers of steps were reached.
        begun: the steps whose first message is complete.
    """

    def __init__(self, config: CacheRankConfig, steps: Tensor, exchanged: Tensor) -> None:
        """Read, in every forward pass, two tensors that the caller fills before it.

        Args:
            steps: (2,) int64, `awaited_step`, and the step's own number, or 0 when it exchanges
                nothing.
            exchanged: (max batch,) int64, the index among the exchanged requests of each batch row,
                or -1.
        """
        device, layer_messages = steps.device, config.layer_messages
        sizes = up_sizes(config, config.max_rows)
        self.staging = [
            UpMessage(
                config,
                layer_message,
                config.max_rows,
                torch.zeros(size, dtype=torch.uint8, device=device),
            )
            for layer_message, size in zip(layer_messages, sizes, strict=True)
        ]
        self.computed = torch.zeros(len(layer_messages), dtype=torch.int64, device=device)
        self.applied = torch.zeros(len(config.groups), dtype=torch.int64, device=device)
        self.accepts = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._given_up = torch.zeros(RING_ENTRIES, dtype=torch.int64).pin_memory()
        self._given_up_seen = self._given_up.numpy()
        self.clock = StepClock(config, device)
        self.begun = DeviceToHostRing(steps[1:])
        self._steps, self._exchanged = steps, exchanged
        self._index_by_kv = index_by_kv(layer_messages)
        self._index_by_hidden = index_by_hidden(layer_messages)
        self._fresh = {message.selects_for for message in layer_messages if message.same_step}
        self._side_stream = torch.cuda.Stream(device)
        # The memory of what is being packed must not be used again before that is done.
        self._packing: list[Tensor] = []
        self._config = config

    @property
    def is_open(self) -> bool:
        """Whether answers that forward passes wait for can still come."""
        return bool(self.accepts[0])

    def open(self) -> None:
        """Let forward passes wait for answers: a cache rank is connected."""
        self.clock.forget()  # a wait that a loss ended is none of this connection's
        self.accepts[0] = 1

    def close(self) -> None:
        """End all waits: no answer will come any more. Safe from any thread."""
        self.accepts[0] = 0
        self.awaited_step = 0

    def timed_out(self, step: int) -> bool:
        """Whether a forward pass, which has been computed, went on without an answer.

        Args:
            step: one of the newest RING_ENTRIES.
        """
        return int(self._given_up_seen[step % RING_ENTRIES]) == step

    def begin_forward(self) -> None:
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            pack.stamp(self.clock.stamps, 0)
            if 0 not in self._index_by_hidden:
                self._wait_for_slots(0)

    def stage_hidden(self, group: int, hidden: Tensor, residual: Tensor | None) -> None:
        index = self._index_by_hidden[group]
        self._packing += (hidden,) if residual is None else (hidden, residual)
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            pack.pack_hidden(
                self.staging[index].hidden, self._exchanged[: hidden.shape[0]], hidden, residual
            )
            self._complete(index)
            self._wait_for_slots(group)

    def enter_group(self, group: int) -> None:
        self._join()

    def stage(
        self, group: int, layer_in_group: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        layer = self._config.groups[group][layer_in_group]
        self._packing += queries, keys, values
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            pack.pack_layer(
                self.staging[self._index_by_kv[group]].tokens,
                self._exchanged[: queries.shape[0]],
                layer_in_group,
                queries,
                keys,
                values,
                self.clock.stamps,
                1 + layer,
            )

    def leave_group(self, group: int) -> None:
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            following, is_last = group + 1, group + 1 == len(self._config.groups)
            if following not in self._index_by_hidden:
                self._complete(self._index_by_kv[group])
                if not is_last:
                    self._wait_for_slots(following)
            if is_last:
                self.clock.report(self._steps[1:])
        if is_last:
            self._join()

    def _complete(self, index: int) -> None:
        gate.raise_flag(self.computed, index, self._steps[1:])
        if index == 0:
            self.begun.post(self._steps[1:])

    def _wait_for_slots(self, group: int) -> None:
        step = self._steps[1:]
        awaited = step if group in self._fresh else self._steps[:1]
        gate.wait_for(self.applied, group, awaited, self.accepts, step, self._given_up)

    def _join(self) -> None:
        """Let the forward pass wait for what has been queued beside it."""
        torch.cuda.current_stream().wait_stream(self._side_stream)
        self._packing.clear()
