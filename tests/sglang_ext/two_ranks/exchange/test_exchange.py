"""The exchange of CPU ranks, against a selector in the same process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from inference_side import BLOCK_ROWS, CONFIG, MODEL, Decoding, InferenceSide, Transfer, rows_of
from torch import Tensor

from cache_rank.channels.transport import TransportError
from cache_rank.config import CacheRankConfig
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import (
    AnswerHeader,
    DownMessage,
    Load,
    QueryProjection,
    Restore,
    Row,
    Step,
    projection_shape,
)
from sglang_ext.request_state import RequestStatistics
from sglang_ext.two_ranks.exchange import base
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError
from sglang_ext.two_ranks.lifecycle import SparseSequence

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
            projection = torch.randn(projection_shape(config))
            side.exchange.send_of_layer(QueryProjection(layer), projection)
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
    assert side.connection.sent == [
        Load(1, 0, 10),
        Load(1, 10, 10),
        Step(1, [Row(1, 20)]),
        Step(2, [Row(1, 21)], traced=True),
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


def test_what_is_under_way_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it lies in the same memory, in which as much is under way as has room."""
    monkeypatch.setattr(base, "SHIPPED_TOKENS", 45)
    side = InferenceSide()
    sequence = SparseSequence(1, None, 1, 300, 100, RequestStatistics())
    under_way: list[tuple[Tensor, Tensor]] = []
    send = side.connection.link.bulk.send

    def note(shipment: Tensor) -> Any:
        under_way.append((shipment, shipment.clone()))
        return send(shipment)

    side.connection.link.bulk.send = note
    most = 0
    for count in (10, 20, 15, 1, 1, 40, 45, 5, 7, 9, 3, 30):
        before = side.connection.log.count("wait for bulk")
        rows = torch.arange(sequence.shipped, sequence.shipped + count)
        side.exchange.ship([(sequence, count)], rows)
        del under_way[: side.connection.log.count("wait for bulk") - before]
        for shipment, sent in under_way:
            assert torch.equal(shipment, sent)
        most = max(most, sum(shipment.shape[2] for shipment, _ in under_way))
    assert 40 < most <= 45


def test_a_loss_in_a_forward_pass_closes_the_gate_and_ends_the_step() -> None:
    side = InferenceSide()
    request = side.arrive(20)

    def lose(buffer: Tensor, buffer_index: int) -> Transfer:
        raise TransportError("the peer is gone")

    side.connection.link.up.send = lose
    with pytest.raises(TransportError, match="the peer is gone"):
        side.step([request])
    assert side.gate.exchange is None
    assert side.connection.log.count("receive 0") == 0, "nothing is done after a loss"
    assert side.exchange.stale_requests(side.steps, [request.sequence]) == [request.sequence]
    side.connection.link.close = lambda: None
    side.exchange.close()
    assert side.exchange.failure is None, "its traceback holds the buffers of the lost connection"


def test_a_step_that_has_its_answers_is_not_stale() -> None:
    side = InferenceSide()
    request = side.arrive(20)
    side.step([request])
    assert side.exchange.stale_requests(side.steps, [request.sequence]) == []
    side.exchange.announce(2, rows_of([request]))
    assert side.exchange.stale_requests(1, [request.sequence]) == []
    assert side.exchange.stale_requests(2, [request.sequence]) == [request.sequence]


@pytest.mark.parametrize("counted", [PAGE_TOKENS, 0, None])
@pytest.mark.parametrize("wanted", [PAGE_TOKENS, 100])
def test_a_page_comes_back_into_its_rows_or_the_cache_rank_is_lost(
    counted: int | None, wanted: int
) -> None:
    """It says how many tokens come; None never comes. The last ones of the page are wanted."""
    side = InferenceSide()
    model = CONFIG.model
    page = torch.randn(2, model.layers, model.kv_heads, PAGE_TOKENS, model.head_dim)
    packed = page.view(-1).view(torch.uint8)
    coming = iter([] if counted is None else [torch.tensor(counted), packed])

    def receive(into: Tensor) -> Transfer:
        def finish() -> None:
            if (tensor := next(coming, None)) is None:
                raise TransportError("nothing came")
            into.copy_(tensor)

        return Transfer(side.connection.log, "bulk", finish)

    side.connection.link.bulk.receive = receive
    before = [buffer.clone() for buffer in (*side.keys, *side.values)]
    rows = torch.randperm(PAGE_TOKENS)[:wanted] + 9
    if not counted:
        with pytest.raises((CacheRankDownError, TransportError)):
            side.exchange.restore([7], rows)
    else:
        side.exchange.restore([7], rows)
        for index, buffer in enumerate(before):
            buffer[rows] = page.flatten(0, 1)[index].transpose(0, 1)[-wanted:]
    assert side.connection.sent == [Restore([7])]
    assert side.exchange.counters.tokens_restored == (wanted if counted else 0)
    for held, expected in zip((*side.keys, *side.values), before, strict=True):
        assert torch.equal(held[1:], expected[1:])  # row 0 is padding


def test_each_few_pages_that_come_back_have_a_deadline_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, pages = InferenceSide(), 50
    packed = torch.zeros(2 * CONFIG.model.bytes_per_token * PAGE_TOKENS, dtype=torch.uint8)
    now, left = [0.0], []
    monkeypatch.setattr(base.time, "monotonic", lambda: now[0])

    def receive(into: Tensor) -> Any:
        into.copy_(torch.tensor(pages * PAGE_TOKENS) if into.numel() == 1 else packed[: len(into)])
        now[0] += side.connection.timeout / 20
        return SimpleNamespace(wait=left.append)

    side.connection.link.bulk.receive = receive
    side.exchange.restore([*range(pages)], torch.zeros(pages * PAGE_TOKENS, dtype=torch.int64))
    assert len(left) == 1 + pages
    assert min(left) > side.connection.timeout / 10
