"""What the host of a GPU watches: the steps whose answers its device is not done with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from sglang_ext.request_state import RequestStatistics
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError
from sglang_ext.two_ranks.exchange.device import exchange
from sglang_ext.two_ranks.exchange.device.exchange import InflightSteps, Outcome, Verifications
from sglang_ext.two_ranks.exchange.slots import ExchangedRow
from sglang_ext.two_ranks.lifecycle import SparseSequence

GROUPS, TIMEOUT = 2, 5.0


class Clock:
    """The time, which tests move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(exchange, "time", clock)
    yield clock
    assert time.monotonic() != clock.now


def sequence_of(sequence_id: int, ended: bool = False) -> SparseSequence:
    return SparseSequence(sequence_id, None, sequence_id, 0, 0, RequestStatistics(), ended=ended)


def rows_of(*sequences: SparseSequence) -> list[ExchangedRow]:
    return [ExchangedRow(sequence, index, 20, 4, 4) for index, sequence in enumerate(sequences)]


def steps_of(*numbers: int) -> InflightSteps:
    steps = InflightSteps(GROUPS, TIMEOUT)
    for number in numbers:
        steps.add(number, rows_of(sequence_of(1)))
    return steps


def reap(steps: InflightSteps, outcomes: dict[int, Outcome]) -> list[tuple[int, int]]:
    """The sequences and tokens of the steps that are done."""
    reaped = steps.reap(max(outcomes, default=0), lambda step: outcomes[step])
    return [(sequence.sequence_id, tokens) for sequence, tokens in reaped]


def test_an_overdue_answer_means_the_cache_rank_is_down(clock: Clock) -> None:
    steps = steps_of(7, 8)
    steps.check_deadline(applied=6, computed=8)
    clock.now += TIMEOUT
    steps.check_deadline(applied=6, computed=8)
    clock.now += 1
    with pytest.raises(CacheRankDownError, match=r"no answer to step 7 in 6\.0 s"):
        steps.check_deadline(applied=6, computed=8)


def test_the_wait_for_an_answer_begins_when_its_step_has_been_computed(clock: Clock) -> None:
    steps = steps_of(7)
    steps.check_deadline(applied=6, computed=6)
    clock.now += 2 * TIMEOUT  # a long prompt is computed before it
    steps.check_deadline(applied=6, computed=7)
    clock.now += TIMEOUT - 1
    steps.check_deadline(applied=6, computed=7)
    clock.now += 2
    with pytest.raises(CacheRankDownError):
        steps.check_deadline(applied=6, computed=7)


def test_a_step_that_is_answered_is_never_overdue(clock: Clock) -> None:
    steps_of().check_deadline(applied=0, computed=0)
    steps = steps_of(7, 8)
    steps.check_deadline(applied=6, computed=8)
    clock.now += 2 * TIMEOUT
    steps.check_deadline(applied=7, computed=8)
    assert reap(steps, {7: [[GROUPS], [0]]}) == [(1, 0)]
    steps.check_deadline(applied=7, computed=8)  # the wait for step 8 begins now


def test_steps_are_reaped_in_order_when_the_device_is_done() -> None:
    steps = InflightSteps(GROUPS, TIMEOUT)
    both = rows_of(sequence_of(1), sequence_of(2))
    for number, rows in ((1, both), (2, rows_of(sequence_of(2))), (3, both)):
        steps.add(number, rows)
    outcomes: dict[int, Outcome] = {
        1: [[GROUPS, GROUPS, 0], [10, 20, 0]],
        2: [[GROUPS, 0, 0], [5, 0, 0]],
    }
    assert reap(steps, outcomes) == [(1, 10), (2, 20), (2, 5)]
    assert len(steps) == 1
    assert reap(steps, outcomes) == []


def test_an_answer_that_was_not_applied_means_the_cache_rank_is_down_unless_it_ended() -> None:
    outcomes: dict[int, Outcome] = {1: [[GROUPS, GROUPS - 1], [3, 4]]}
    steps = InflightSteps(GROUPS, TIMEOUT)
    steps.add(1, rows_of(sequence_of(1), sequence_of(2, ended=True)))
    assert reap(steps, outcomes) == [(1, 3), (2, 4)]
    steps.add(1, rows_of(sequence_of(1), sequence_of(2)))
    with pytest.raises(CacheRankDownError, match="the answer to step 1 is not for sequence 2"):
        reap(steps, outcomes)


def test_requests_miss_a_step_whose_answers_have_not_been_applied() -> None:
    first, second = sequence_of(1), sequence_of(2)
    steps = InflightSteps(GROUPS, TIMEOUT)
    steps.add(7, rows_of(first, second))
    steps.add(8, rows_of(first, second))
    outcomes: dict[int, Outcome] = {7: ([2, 1], [5, 5])}

    def missed(step: int, newest: int) -> list[SparseSequence]:
        return steps.stale_requests(step, newest, lambda number: outcomes[number])

    assert missed(7, newest=6) == [first, second]
    assert missed(7, newest=7) == [second]
    assert missed(8, newest=7) == [first, second]
    assert missed(6, newest=7) == []  # it was reaped long ago
    with pytest.raises(CacheRankDownError, match="step 7 is not for sequence 2"):
        reap(steps, outcomes)
    assert missed(7, newest=7) == [second], "a step that could not be reaped is still known"
    outcomes[7] = ([2, 2], [5, 5])
    assert reap(steps, outcomes) == [(1, 5), (2, 5)]
    assert missed(7, newest=7) == []


def test_a_verification_under_way_for_too_long_means_that_too(
    clock: Clock, device: torch.device
) -> None:
    verifications = Verifications(device, TIMEOUT)

    def check_after(seconds: float, *queued: Callable[[], None]) -> None:
        for queue in queued:
            queue()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock.now += seconds
        verifications.check_deadline()

    check_after(0, verifications.begin)
    check_after(TIMEOUT)
    check_after(1, verifications.end)
    check_after(TIMEOUT, verifications.begin)  # it is seen only now
    check_after(TIMEOUT)
    with pytest.raises(CacheRankDownError, match=r"not answered in 6\.0 s"):
        check_after(1)
    check_after(0, verifications.end)
