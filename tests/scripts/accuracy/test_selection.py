"""Replays of a recording, which measure what was selected by the keys and queries as they came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modelled_request import Request
from small_models import GQA, small_config

from cache_rank.config import CacheRankConfig
from scripts.accuracy.selection import StepResult, base_config, replay

PROMPT, STEPS = 50, 12


def recording(config: CacheRankConfig, repeats: bool) -> list[dict[str, Any]]:
    """What a cache rank receives of one request, whose queries may stay the same."""
    request = Request(config, 1, PROMPT)
    events: list[dict[str, Any]] = [
        {"kind": "config", "config": config},
        {"kind": "load", "epoch": 1, "shipment": request.prompt},
    ]
    first: torch.Tensor | None = None
    for position in range(PROMPT, PROMPT + STEPS):
        queries, keys, values, _ = request.compute()
        first = queries if first is None else first
        row = {
            "epoch": 1,
            "position": position,
            "queries": first if repeats else queries,
            "keys": keys,
            "values": values,
        }
        events.append({"kind": "step", "rows": [row]})
    return events


def results(repeats: bool, **policy: Any) -> list[StepResult]:
    config = small_config(GQA, query_frame="post", **policy)
    events = recording(config, repeats)
    return list(replay(base_config(events), events))


def test_a_query_that_repeats_selects_what_it_needs() -> None:
    found = results(repeats=True, delta_capacity=8)
    assert [step.recall for step in found] == [1.0] * len(found)
    assert all(0 < step.attention_mass <= 1 + 1e-6 for step in found)


def test_other_queries_need_other_tokens() -> None:
    found = results(repeats=False, delta_capacity=8)
    assert 0 < sum(step.recall for step in found) / len(found) < 0.9


@pytest.mark.parametrize(("window", "capacity", "steps"), [(4, 8, 5), (4, 1, 8), (7, 2, 8)])
def test_steps_count_from_where_window_and_slots_are_full(
    window: int, capacity: int, steps: int
) -> None:
    found = results(repeats=True, query_window=window, delta_capacity=capacity)
    assert len(found) == STEPS - steps
