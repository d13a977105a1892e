"""When selection makes a decode step shorter."""

from __future__ import annotations

import pytest

from cache_rank.budget import DEFAULT_CURVE
from sglang_ext.payoff import Payoff, StepTime

# A model reads 4 bytes of K and V and 1 of a sketch a token; selection takes 10 seconds beside.
PAYOFF = Payoff(StepTime(100.0, 0.5), StepTime(110.0, 1.0), token_bytes=4, sketch_bytes=1)


def test_a_step_takes_what_it_reads_and_something_beside() -> None:
    assert PAYOFF.dense.of(8) == 104.0


@pytest.mark.parametrize(
    ("tokens", "scored", "attended", "is_shorter"),
    [
        (100, 100, 10, True),  # 300 without selection; 250 with it
        (100, 100, 22, True),  # 298
        (100, 100, 23, False),  # 302
        (100, 40, 36, True),  # 294; 60 of the tokens are of dense requests
        (5, 5, 0, False),
    ],
)
def test_steps_are_compared_by_what_they_read(
    tokens: int, scored: int, attended: int, is_shorter: bool
) -> None:
    assert PAYOFF.is_shorter(tokens, scored, attended) == is_shorter


def test_the_shortest_length_that_pays_is_found() -> None:
    found = PAYOFF.shortest(1, lambda length: 0, range(64))
    assert found == 11  # 22 > 10 + 11
    assert PAYOFF.shortest(2, lambda length: 0, range(64)) == 6
    assert PAYOFF.shortest(1, lambda length: length, range(64)) is None
    assert PAYOFF.shortest(1, lambda length: 0, range(0)) is None


def test_more_requests_pay_from_shorter_lengths_on() -> None:
    """With what one H200 takes for Qwen3-8B, as measured."""
    payoff = Payoff(StepTime(4e-3, 2.3e-13), StepTime(5.3e-3, 2.9e-13), 143_360, 8_960)
    found = [payoff.shortest(n, DEFAULT_CURVE.at, range(1024, 32768)) for n in (1, 4, 16, 64)]
    assert all(lengths is not None for lengths in found[1:])
    assert found[1:] == sorted(found[1:], reverse=True)
