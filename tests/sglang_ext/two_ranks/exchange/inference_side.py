"""The exchange of a CPU rank over a pool, and a selector in the place of its cache rank."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels.wire.reference import from_wire, to_wire
from cache_rank.protocol import (
    Adopt,
    DownMessage,
    Load,
    QueryProjection,
    Share,
    Step,
    UpMessage,
    down_sizes,
)
from cache_rank.residency.encoding import shipment_bytes
from cache_rank.selector import Selector
from cache_rank.selector_step import SelectorStep
from sglang_ext.request_state import RequestStatistics
from sglang_ext.two_ranks.exchange.base import ExchangeCounters
from sglang_ext.two_ranks.exchange.host import HostExchange, HostGate
from sglang_ext.two_ranks.exchange.slots import ExchangedRow, SlotBuffers
from sglang_ext.two_ranks.lifecycle import SparseSequence

CPU = torch.device("cpu")
MODEL = ModelShape(3, query_heads=4, kv_heads=2, head_dim=8, dtype="float32", scale=8**-0.5)
CONFIG = CacheRankConfig(
    MODEL,
    layers_per_group=2,
    sparse_budget=6,
    sink_tokens=2,
    recent_tokens=3,
    query_window=2,
    hysteresis=1,
    max_swap_tokens=2,
    max_rows=3,
    kv_residency="bf16",
    checksum=True,
)
POOL_ROWS = 400
BLOCK_ROWS = CONFIG.sink_tokens + CONFIG.sparse_budget


class Transfer:
    """A transfer whose end is something that happens when it is waited for."""

    def __init__(self, log: list[str], name: str, finish: Callable[[], None]) -> None:
        self._log, self._name, self._finish = log, name, finish
        self._is_done = False

    def is_done(self) -> bool:
        return self._is_done

    def wait(self, timeout: float) -> None:
        self._log.append(f"wait for {self._name}")
        if not self._is_done:
            self._is_done = True
            self._finish()


class CacheRankInProcess:
    """In the place of a connection: a selector, whose answers arrive when they are waited for."""

    def __init__(self, config: CacheRankConfig = CONFIG) -> None:
        self.config = config
        self.timeout = 1.0
        self.sent: list[Any] = []
        self.log: list[str] = []
        self.seconds = 0.0
        """How long an answer takes to come."""
        self.answered: Callable[[DownMessage], None] = lambda down: None
        self.control = SimpleNamespace(send=self._take_control, close=lambda: None)
        self.link = SimpleNamespace(
            up=SimpleNamespace(send=self._take_up),
            down=SimpleNamespace(receive=self._give_down),
            bulk=SimpleNamespace(send=self._take_bulk),
            buffers=[torch.empty(size).byte() for size in down_sizes(config, config.max_rows)],
        )
        self.selector = Selector(config, CPU, 1 << 22)
        self._loads: deque[Load] = deque()
        self._layers: deque[int] = deque()
        self._steps: deque[tuple[SelectorStep, int]] = deque()
        self._indices = itertools.cycle(range(len(config.layer_messages)))
        self._step: SelectorStep | None = None
        self._up: UpMessage | None = None
        self._layer_message = config.layer_messages[0]

    def _take_control(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Step):
            self._step = self.selector.begin_step(message.step, message.rows)
        elif isinstance(message, Load):
            if message.sequence_id not in self.selector.sequences:
                self.selector.begin(message.sequence_id)
            self._loads.append(message)
        elif isinstance(message, Adopt):
            adopting = self.selector.begin(message.sequence_id)
            self.selector.adopt(adopting, message.names)
        elif isinstance(message, Share):
            sharing = self.selector.sequences[message.sequence_id]
            assert self.selector.may_share(sharing, message.names)
            self.selector.share(sharing, message.names)
        elif isinstance(message, QueryProjection):
            self._layers.append(message.layer)

    def _take_bulk(self, shipment: Tensor) -> Transfer:
        if self._layers:
            self.selector.load_projection(self._layers.popleft(), shipment)
            return Transfer(self.log, "bulk", lambda: None)
        load = self._loads.popleft()
        sequence = self.selector.sequences[load.sequence_id]
        if load.as_codes:
            assert shipment.nbytes == shipment_bytes(self.config, load.count)
            assert self.selector.may_load_pages(sequence, load.start)
            self.selector.load_pages(sequence, load.count, shipment)
        else:
            assert shipment.shape[2] == load.count
            assert sequence.tokens == load.start
            self.selector.load(sequence, shipment)
        return Transfer(self.log, "bulk", lambda: None)

    def _take_up(self, buffer: Tensor, buffer_index: int) -> Transfer:
        assert buffer_index == next(self._indices)
        self.log.append(f"send {buffer_index}")
        assert self._step is not None
        rows = self._step.rows.slots.shape[0]
        self._layer_message = self.config.layer_messages[buffer_index]
        self._up = UpMessage(self.config, self._layer_message, rows, buffer.clone())
        if self._layer_message.selects_for is None:
            self._serve(None)
        return Transfer(self.log, f"send {buffer_index}", lambda: None)

    def _serve(self, down: DownMessage | None) -> None:
        assert self._step is not None
        assert self._up is not None
        self.selector.serve(self._step, self._layer_message, self._up, down)

    def _give_down(self, buffer: Tensor, buffer_index: int) -> Transfer:
        assert buffer_index == self._layer_message.selects_for
        self.log.append(f"receive {buffer_index}")
        assert self._step is not None
        layers, rows = len(self.config.groups[buffer_index]), self._step.rows.slots.shape[0]
        down = DownMessage(self.config, layers, rows, torch.zeros_like(buffer))
        self._serve(down)

        def finish() -> None:
            time.sleep(self.seconds)
            self.answered(down)
            buffer.copy_(down.buffer)

        return Transfer(self.log, f"receive {buffer_index}", finish)


@dataclasses.dataclass
class Decoding:
    """A request on the inference rank, whose tokens lie in the pool one after the other."""

    sequence: SparseSequence
    first_row: int
    position: int

    @property
    def filled_after(self) -> int:
        return CONFIG.filled_after(self.position, self.sequence.filled)

    @property
    def fresh_filled(self) -> int:
        return CONFIG.filled_after(self.position - 1, self.sequence.fresh_filled)


def rows_of(batch: Sequence[Decoding | None]) -> list[ExchangedRow]:
    """The requests of a batch; None is a row that is not exchanged."""
    return [
        ExchangedRow(
            request.sequence, index, request.position, request.filled_after, request.fresh_filled
        )
        for index, request in enumerate(batch)
        if request is not None
    ]


class InferenceSide:
    """A pool, and an exchange over it, one step at a time."""

    def __init__(
        self,
        config: CacheRankConfig = CONFIG,
        pool_rows: int = POOL_ROWS,
        coded_tokens: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self.config = config
        self.connection = CacheRankInProcess(config)
        shape = (pool_rows, MODEL.kv_heads, MODEL.head_dim)
        self.keys = [torch.randn(shape) for _ in range(MODEL.layers)]
        self.values = [torch.randn(shape) for _ in range(MODEL.layers)]
        connection: Any = self.connection
        self.gate = HostGate()
        slots = SlotBuffers(config, self.keys, self.values)
        counters = ExchangeCounters()
        self.exchange = HostExchange(
            connection, config, slots, counters, self.gate, 0, coded_tokens
        )
        self.steps = 0
        self._sequence_ids = itertools.count(1)

    def arrive(self, prompt: int) -> Decoding:
        sequence_id = next(self._sequence_ids)
        block = 300 + (sequence_id - 1) * BLOCK_ROWS
        sequence = SparseSequence(
            sequence_id, None, sequence_id, block, prompt, RequestStatistics()
        )
        request = Decoding(sequence, 100 * (sequence_id - 1), prompt)
        pool_rows = torch.arange(request.first_row, request.first_row + prompt)
        for rows in (pool_rows[: prompt // 2], pool_rows[prompt // 2 :]):
            self.exchange.ship([(sequence, len(rows))], rows)
        assert sequence.shipped == prompt
        return request

    def step(self, batch: list[Decoding | None], traced: bool = False) -> None:
        """One decode step; None is a row of the batch that is not exchanged."""
        exchange, gate, config = self.exchange, self.gate, self.config
        live = [(index, request) for index, request in enumerate(batch) if request is not None]
        self.steps += bool(live)
        exchange.announce(self.steps if live else 0, rows_of(batch), traced)
        for group, layers in enumerate(config.groups):
            if config.forecasts:
                states = torch.randn(2, len(batch) + 2, config.model.hidden_size)
                gate.stage_hidden(group, states[0], states[1] if group else None)
            gate.enter_group(group)
            for layer_in_group, layer in enumerate(layers):
                queries = torch.randn(len(batch) + 2, MODEL.query_heads, MODEL.head_dim)
                keys, values = torch.randn(2, len(batch) + 2, MODEL.kv_heads, MODEL.head_dim)
                for index, request in live:
                    pool_row = request.first_row + request.position
                    self.keys[layer][pool_row] = keys[index]
                    self.values[layer][pool_row] = values[index]
                gate.stage(group, layer_in_group, queries, keys, values)
            gate.leave_group(group)
        exchange.finish_step()
        for _, request in live:
            sequence = request.sequence
            sequence.filled, sequence.fresh_filled = request.filled_after, request.fresh_filled
            request.position += 1

    def apply_answers(self) -> None:
        """Apply the answers as the next step does, group by group."""
        self.exchange.announce(0, [])
        for group in range(len(self.config.groups)):
            self.gate.enter_group(group)
            self.gate.leave_group(group)
        self.exchange.finish_step()

    def assert_slots_equal_the_slot_map(self, request: Decoding) -> None:
        selector, sequence = self.connection.selector, request.sequence
        slot_map = selector.slot_map(selector.sequences[sequence.sequence_id], range(MODEL.layers))
        first = sequence.block + CONFIG.sink_tokens
        for layer in range(MODEL.layers):
            for head in range(MODEL.kv_heads):
                tokens = slot_map[layer, head, : sequence.filled].to(torch.int64)
                assert (tokens >= 0).all()
                for buffers in (self.keys, self.values):
                    held = buffers[layer][first : first + sequence.filled, head]
                    source = buffers[layer][request.first_row + tokens, head]
                    shipped = to_wire(source, self.config.wire_torch_dtype)
                    assert torch.equal(held, from_wire(shipped, held.dtype))
