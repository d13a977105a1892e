"""How many drafts a round has."""

from __future__ import annotations

import pytest

from sglang_ext.drafts.number import TRY_AGAIN_AFTER, Acceptance, DraftNumber
from sglang_ext.payoff import Payoff, StepTime, VerificationTime

# Dense steps take 100 seconds, drafts 40 and a verification 110, with whatever is read.
PAYOFF = Payoff(
    StepTime(100.0, 0.0),
    StepTime(40.0, 0.0),
    token_bytes=4,
    sketch_bytes=1,
    verification=VerificationTime(StepTime(110.0, 0.0), requests=2, of_request=5.0),
)


def seconds_of_a_token(drafts: int, share: float) -> float:
    if not drafts:
        return 100.0
    return (40 * drafts + 110) / sum(share**n for n in range(drafts + 1))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.95, 1.0])
def test_the_number_has_the_least_time_for_a_token(share: float) -> None:
    number = DraftNumber(8, PAYOFF)
    for _ in range(1000):  # of a thousand drafts, so many are right
        number._acceptance = Acceptance(share * 1000, 1000)
    found = number.choose(2, tokens=1000, scored=1000, attended=100)
    assert found == min(range(9), key=lambda drafts: seconds_of_a_token(drafts, share))
    assert (found == 0) == (share <= 0.5)


def test_a_verification_of_more_requests_takes_longer() -> None:
    times = PAYOFF.of_round(4, tokens=1000, scored=1000, attended=100)
    assert times == (100.0, 40.0, 120.0)


def test_steps_take_what_they_read() -> None:
    payoff = PAYOFF._replace(
        dense=StepTime(1.0, 0.5),
        sparse=StepTime(2.0, 1.0),
        verification=VerificationTime(StepTime(3.0, 2.0), requests=2, of_request=0.0),
    )
    assert payoff.of_round(2, tokens=10, scored=6, attended=5) == (21.0, 28.0, 83.0)


def test_drafts_are_compared_up_to_the_first_wrong_one() -> None:
    share = Acceptance(0.0, 0.0).after([4, 0, 2], drafts=4)
    assert share == Acceptance(6.0, 8.0)  # the four of the first request, 1, and 3


def test_without_times_every_round_has_the_most() -> None:
    assert DraftNumber(5, None).choose(1, 10, 10, 5) == 5


def test_wrong_drafts_are_given_up_and_tried_again() -> None:
    number = DraftNumber(8, PAYOFF)
    load = 2, 1000, 1000, 100
    assert number.choose(*load) > 0
    for _ in range(200):
        number.note([0, 0], 4)
    assert number.state()["right"] < 0.1
    choices = [number.choose(*load) for _ in range(2 * TRY_AGAIN_AFTER)]
    assert [place for place, drafts in enumerate(choices, 1) if drafts] == [
        TRY_AGAIN_AFTER,
        2 * TRY_AGAIN_AFTER,
    ]


def test_a_dense_step_says_nothing_of_drafts() -> None:
    number = DraftNumber(8, PAYOFF)
    before = number.state()
    number.note([0, 0], 0)
    assert number.state() == before
