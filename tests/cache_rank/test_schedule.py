"""In a step, every group is left, entered and answered once, in an order that can be computed."""

from __future__ import annotations

import pytest

from cache_rank.schedule import by_forecast, by_history


def test_by_history_a_group_is_answered_when_it_was_left() -> None:
    assert [(b.left, b.entered, b.answered, b.is_fresh) for b in by_history(2)] == [
        (0, None, 0, False),
        (1, None, 1, False),
    ]


def test_by_forecast_a_group_is_answered_its_lead_before_it_is_entered() -> None:
    assert [(b.left, b.entered, b.answered, b.is_fresh) for b in by_forecast(3, lead=1)] == [
        (None, 0, 1, True),
        (0, 1, 2, True),
        (1, 2, 0, False),
        (2, None, None, False),
    ]


@pytest.mark.parametrize(("groups", "lead"), [(2, 1), (5, 1), (5, 4), (18, 2)])
def test_every_group_is_served_in_time(groups: int, lead: int) -> None:
    boundaries = by_forecast(groups, lead)
    assert [b.left for b in boundaries] == [None, *range(groups)]
    assert [b.entered for b in boundaries] == [*range(groups), None]
    assert sorted(b.answered for b in boundaries if b.answered is not None) == [*range(groups)]
    for place, boundary in enumerate(boundaries[:-1]):
        assert boundary.answered is not None
        if boundary.is_fresh:
            # Selected before it is entered, and before its token is appended.
            assert boundary.answered == place + lead
        else:
            # For the next step, by the queries that have come.
            assert boundary.answered < lead
            assert boundary.answered < place
