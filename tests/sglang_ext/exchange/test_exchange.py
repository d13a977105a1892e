"""The exchange of CPU ranks, against a selector in the same process."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from cache_rank.channels.transport import TransportError
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels.wire.reference import from_wire, to_wire
from cache_rank.measure.timeline import Timeline
from cache_rank.protocol import (
    AnswerHeader,
    DownMessage,
    End,
    Flush,
    Load,
    QueryProjection,
    Row,
    Step,
    UpMessage,
    down_sizes,
    projection_shape,
    up_sizes,
)
from cache_rank.selector import Selector, SelectorStep
from sglang_ext.exchange.connection import CacheRankDownError
from sglang_ext.exchange.host import MAX_SHIPMENTS_UNDER_WAY, HostExchange, HostGate
from sglang_ext.exchange.slots import ExchangedRows, SlotBuffers
from sglang_ext.lifecycle import RequestStatistics, SparseSequence

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
        self._timeline = Timeline("", CPU)

    def _take_control(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Step):
            self._step = self.selector.begin_step(message.step, message.rows)
        elif isinstance(message, Load):
            if message.start == 0:
                self.selector.begin(message.sequence_id)
            self._loads.append(message)
        elif isinstance(message, QueryProjection):
            self._layers.append(message.layer)

    def _take_bulk(self, shipment: Tensor) -> Transfer:
        if self._layers:
            self.selector.load_projection(self._layers.popleft(), shipment)
            return Transfer(self.log, "bulk", lambda: None)
        load = self._loads.popleft()
        assert shipment.shape[2] == load.count
        self.selector.load(self.selector.sequences[load.sequence_id], shipment)
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
        self.selector.serve(self._step, self._layer_message, self._up, down, self._timeline)

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


def rows_of(batch: Sequence[Decoding | None]) -> ExchangedRows:
    """The requests of a batch; None is a row that is not exchanged."""
    rows = ExchangedRows()
    for index, request in enumerate(batch):
        if request is not None:
            filled = request.filled_after, request.fresh_filled
            rows.add(request.sequence, index, request.position, *filled)
    return rows


class InferenceSide:
    """A pool, and an exchange over it, one step at a time."""

    def __init__(self, config: CacheRankConfig = CONFIG) -> None:
        torch.manual_seed(0)
        self.config = config
        self.connection = CacheRankInProcess(config)
        shape = (POOL_ROWS, MODEL.kv_heads, MODEL.head_dim)
        self.keys = [torch.randn(shape) for _ in range(MODEL.layers)]
        self.values = [torch.randn(shape) for _ in range(MODEL.layers)]
        connection: Any = self.connection
        self.gate = HostGate()
        slots = SlotBuffers(config, self.keys, self.values)
        self.exchange = HostExchange(connection, config, slots, self.gate)
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
        self.exchange.ship(sequence, pool_rows[: prompt // 2])
        self.exchange.ship(sequence, pool_rows[prompt // 2 :])
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
        self.exchange.announce(0, ExchangedRows())
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


FORECAST = msgspec.structs.replace(
    CONFIG,
    model=msgspec.structs.replace(MODEL, hidden_size=20),
    query_predictor="forecast",
    forecast_lead=1,
)


@pytest.mark.parametrize(
    ("config", "wire"), [(CONFIG, "bf16"), (CONFIG, "int8"), (FORECAST, "bf16")]
)
def test_slots_hold_what_the_cache_rank_chose(config: CacheRankConfig, wire: str) -> None:
    checksum = CONFIG.checksum and wire == "bf16"
    side = InferenceSide(msgspec.structs.replace(config, wire_dtype=wire, checksum=checksum))
    if config.forecasts:
        for layer in range(MODEL.layers):
            side.exchange.project(layer, torch.randn(projection_shape(config)))
    brought = side.exchange.counters.bulk_bytes
    first, second = side.arrive(40), side.arrive(25)
    batches: list[list[Decoding | None]] = [
        [first, second],
        [None, second, first],
        [first],
        [None, None],
        [second, None, first],
        *([[first, second]] * 4),
    ]
    for batch in batches:
        side.step(batch)
    side.apply_answers()
    for request in (first, second):
        assert request.sequence.filled == CONFIG.sparse_budget
        side.assert_slots_equal_the_slot_map(request)
    counters = side.exchange.counters
    announced = [message for message in side.connection.sent if isinstance(message, Step)]
    assert len(announced) == 8, "a step without rows is not announced"
    shipped = [request.sequence.statistics.tokens_shipped for request in (first, second)]
    assert sum(shipped) == counters.tokens_shipped > 0
    assert counters.bulk_bytes == 65 * MODEL.bytes_per_token + brought


def test_what_is_announced_is_what_is_exchanged() -> None:
    side = InferenceSide()
    request = side.arrive(20)
    side.step([None, request])
    side.step([request], traced=True)
    side.exchange.end([1])
    side.exchange.flush()
    assert side.connection.sent == [
        Load(1, 0, 10),
        Load(1, 10, 10),
        Step(1, [Row(1, 20)]),
        Step(2, [Row(1, 21)], traced=True),
        End([1]),
        Flush(),
    ]


def test_answers_are_waited_for_by_the_next_step_only() -> None:
    side = InferenceSide()
    request = side.arrive(20)
    side.connection.log.clear()
    side.step([request])
    assert side.connection.log == ["send 0", "receive 0", "send 1", "receive 1"]
    side.connection.log.clear()
    side.step([request])
    assert side.connection.log == [
        *("wait for receive 0", "wait for send 0", "send 0", "receive 0"),
        *("wait for receive 1", "wait for send 1", "send 1", "receive 1"),
    ]


def test_a_forecast_is_waited_for_by_the_step_itself() -> None:
    side = InferenceSide(FORECAST)
    request = side.arrive(20)
    side.connection.log.clear()
    side.step([request])
    assert side.connection.log == [
        *("send 0", "receive 1"),  # what enters group 0 tells what group 1 will ask for
        *("send 1", "receive 0"),  # for the next step
        "wait for receive 1",
        "send 2",
    ]
    side.connection.log.clear()
    side.step([request])
    assert side.connection.log == [
        *("wait for send 0", "send 0", "receive 1"),
        "wait for receive 0",
        *("wait for send 1", "send 1", "receive 0"),
        "wait for receive 1",
        *("wait for send 2", "send 2"),
    ]


def test_late_answers_are_counted_in_the_step_that_waits() -> None:
    side = InferenceSide()
    request = side.arrive(20)
    side.connection.seconds = 0.01
    side.step([request])
    assert not side.exchange.was_late
    side.step([request])
    assert side.exchange.was_late
    assert side.exchange.waited >= 0.02
    side.apply_answers()
    side.step([request])
    assert side.exchange.waited == 0


def test_the_answer_for_a_request_that_ended_is_not_applied() -> None:
    side = InferenceSide()
    staying, leaving = side.arrive(40), side.arrive(25)
    side.step([leaving, staying])
    leaving.sequence.ended = True
    before = [buffer.clone() for buffer in (*side.keys, *side.values)]
    side.apply_answers()
    block = slice(leaving.sequence.block, leaving.sequence.block + BLOCK_ROWS)
    for buffer, old in zip((*side.keys, *side.values), before, strict=True):
        assert torch.equal(buffer[block], old[block])
    side.assert_slots_equal_the_slot_map(staying)
    assert leaving.sequence.statistics.tokens_shipped == 0


@pytest.mark.parametrize("column", ["step", "sequence_id", "resident_tokens", "filled_slots"])
def test_an_answer_that_is_not_the_expected_one_means_the_cache_rank_is_down(column: str) -> None:
    side = InferenceSide()
    request = side.arrive(40)
    side.step([request])
    index = AnswerHeader._fields.index(column)

    def corrupt(down: DownMessage) -> None:
        down.header[0, index] += 1

    side.connection.answered = corrupt
    before = [buffer.clone() for buffer in (*side.keys, *side.values)]
    with pytest.raises(CacheRankDownError, match=r"answered .* expected"):
        side.apply_answers()
    for buffer, old in zip((*side.keys, *side.values), before, strict=True):
        assert torch.equal(buffer, old)


def test_slots_that_differ_from_the_slot_map_are_an_error() -> None:
    side = InferenceSide()
    request = side.arrive(40)
    side.step([request])

    def corrupt(down: DownMessage) -> None:
        down.keys[0, 0, 0, 0, 0] += 1

    side.connection.answered = corrupt
    with pytest.raises(AssertionError, match="slots of sequence 1 at 40 differ from the slot map"):
        side.apply_answers()


def test_only_so_many_shipments_are_under_way() -> None:
    side = InferenceSide()
    sequence = SparseSequence(1, None, 1, 300, 100, RequestStatistics())
    for shipment in range(MAX_SHIPMENTS_UNDER_WAY + 3):
        side.exchange.ship(sequence, torch.arange(10 * shipment, 10 * shipment + 10))
        waits = side.connection.log.count("wait for bulk")
        assert waits == max(0, shipment + 1 - MAX_SHIPMENTS_UNDER_WAY)
    assert sequence.shipped == 10 * (MAX_SHIPMENTS_UNDER_WAY + 3)


def test_shipments_that_have_arrived_are_let_go() -> None:
    side = InferenceSide()
    sent: list[Transfer] = []

    def send(shipment: Tensor) -> Transfer:
        sent.append(Transfer([], "bulk", lambda: None))
        return sent[-1]

    side.connection.link.bulk.send = send
    sequence = SparseSequence(1, None, 1, 300, 100, RequestStatistics())
    for arrived in (0, 2, 1):  # of those that are under way when the next is shipped
        for transfer in sent[-arrived:] if arrived else []:
            transfer.wait(1.0)
        side.exchange.ship(sequence, torch.arange(10))
        side.exchange.ship(sequence, torch.arange(10))
    assert list(side.exchange._shipments) == sent[-4:], "in order, behind one that has not arrived"


def test_a_shipment_is_what_the_pool_holds() -> None:
    side = InferenceSide()
    shipments: list[Tensor] = []

    def keep(shipment: Tensor) -> Transfer:
        shipments.append(shipment)
        return Transfer([], "bulk", lambda: None)

    side.connection.link.bulk.send = keep
    pool_rows = torch.tensor([7, 3, 200, 11])
    sequence = SparseSequence(1, None, 1, 300, 100, RequestStatistics())
    side.exchange.ship(sequence, pool_rows)
    for part, buffers in zip(shipments[0], (side.keys, side.values), strict=True):
        assert torch.equal(part, torch.stack([buffer[pool_rows] for buffer in buffers]))


def test_spans_are_those_of_traced_steps() -> None:
    side = InferenceSide()
    request = side.arrive(20)
    before = time.monotonic_ns() / 1e3
    for traced in (False, True, True, False):
        side.step([request], traced)
    after = time.monotonic_ns() / 1e3
    spans = side.exchange.spans()
    assert [(span.name, span.step, span.group) for span in spans] == [
        (name, step, group)
        for step in (2, 3)
        for group in (0, 1)
        for name in ("wait", "scatter", "group")
    ]
    for span in spans:
        assert before <= span.start <= span.stop <= after
    for previous, span in itertools.pairwise(spans):
        assert previous.stop <= span.start, "spans of one track do not overlap"
    assert side.exchange.spans() == []


def test_bytes_are_counted_as_they_are_sent() -> None:
    side = InferenceSide()
    requests = [side.arrive(20), side.arrive(20)]
    side.step([requests[0]])
    side.step([None, None])
    side.step([requests[1], requests[0]])
    for sizes, counted in (
        (up_sizes, side.exchange.counters.up_bytes),
        (down_sizes, side.exchange.counters.down_bytes),
    ):
        assert counted == sum(sum(sizes(CONFIG, rows)) for rows in (1, 2))


def test_a_loss_in_a_forward_pass_closes_the_gate_and_ends_the_step() -> None:
    side = InferenceSide()
    request = side.arrive(20)
    assert side.gate.is_open

    def lose(buffer: Tensor, buffer_index: int) -> Transfer:
        raise TransportError("the peer is gone")

    side.connection.link.up.send = lose
    with pytest.raises(TransportError, match="the peer is gone"):
        side.step([request])
    assert not side.gate.is_open
    assert side.connection.log.count("receive 0") == 0, "nothing is done after a loss"
    assert isinstance(side.gate.failure, TransportError)
    side.gate.close()
    assert side.gate.failure is None, "its traceback holds the buffers of the lost connection"


def test_a_closed_gate_lets_forward_passes_through() -> None:
    gate = HostGate()
    assert not gate.is_open
    gate.begin_forward()
    gate.enter_group(0)
    gate.stage(0, 0, *torch.zeros(3, 1, 1, 8))
    gate.leave_group(0)
    assert gate.failure is None
