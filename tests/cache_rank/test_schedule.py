"""In a step, every group sends its KV and is selected for once, in an order known beforehand."""

from __future__ import annotations

import pytest

from cache_rank.schedule import by_forecast, by_history


def test_by_history_a_group_is_answered_when_it_was_left() -> None:
    assert [(m.kv_of, m.hidden_of, m.selects_for, m.same_step) for m in by_history(2)] == [
        (0, None, 0, False),
        (1, None, 1, False),
    ]


def test_by_forecast_a_group_is_answered_its_lead_before_it_is_entered() -> None:
    assert [(m.kv_of, m.hidden_of, m.selects_for, m.same_step) for m in by_forecast(3, lead=1)] == [
        (None, 0, 1, True),
        (0, 1, 2, True),
        (1, 2, 0, False),
        (2, None, None, False),
    ]


@pytest.mark.parametrize(("groups", "lead"), [(2, 1), (5, 1), (5, 4), (18, 2)])
def test_every_group_is_served_in_time(groups: int, lead: int) -> None:
    layer_messages = by_forecast(groups, lead)
    assert [m.kv_of for m in layer_messages] == [None, *range(groups)]
    assert [m.hidden_of for m in layer_messages] == [*range(groups), None]
    assert sorted(m.selects_for for m in layer_messages if m.selects_for is not None) == [
        *range(groups)
    ]
    for place, layer_message in enumerate(layer_messages[:-1]):
        assert layer_message.selects_for is not None
        if layer_message.same_step:
            # Selected before it is entered, and before its token is appended.
            assert layer_message.selects_for == place + lead
        else:
            # For the next step, by the queries that have come.
            assert layer_message.selects_for < lead
            assert layer_message.selects_for < place
