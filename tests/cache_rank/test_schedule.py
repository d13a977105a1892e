"""In a step, every group is left, entered and answered once, in an order that can be computed."""

from __future__ import annotations

import pytest

from cache_rank.schedule import MODEL, by_forecast, by_history, serves_early


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


def test_what_enters_the_model_serves_the_last_group_before_the_lead() -> None:
    assert [(b.left, b.entered, b.answered, b.is_fresh) for b in by_forecast(4, 2, early=True)] == [
        (None, MODEL, 1, True),
        (None, 0, 2, True),
        (0, 1, 3, True),
        (1, 2, 0, False),
        (2, 3, None, False),
        (3, None, None, False),
    ]


@pytest.mark.parametrize(
    ("dense_layers", "layers_per_group", "lead", "expected"),
    [(1, 2, 2, True), (1, 1, 4, True), (2, 3, 2, True), (1, 3, 2, False), (0, 1, 2, False),
     (1, 2, 1, False)],
)  # fmt: skip
def test_it_does_where_it_is_nearly_far_enough(
    dense_layers: int, layers_per_group: int, lead: int, expected: bool
) -> None:
    assert serves_early(dense_layers, layers_per_group, lead) is expected


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("groups", "lead"), [(2, 1), (5, 1), (5, 4), (18, 2)])
def test_every_group_is_served_in_time(groups: int, lead: int, early: bool) -> None:
    first, *boundaries = by_forecast(groups, lead, early)
    if early:
        assert first == (None, MODEL, lead - 1, True)
    else:
        boundaries = [first, *boundaries]
    assert [b.left for b in boundaries] == [None, *range(groups)]
    assert [b.entered for b in boundaries] == [*range(groups), None]
    answered = [b.answered for b in by_forecast(groups, lead, early)]
    assert sorted(group for group in answered if group is not None) == [*range(groups)]
    for place, boundary in enumerate(boundaries[:-1]):
        if boundary.answered is None:
            assert early
        elif boundary.is_fresh:
            # Selected before it is entered, and before its token is appended.
            assert boundary.answered == place + lead
        else:
            # For the next step, by the queries that have come.
            assert boundary.answered < lead
            assert boundary.answered < place
