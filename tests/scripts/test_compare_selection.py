"""Replays of a recording, which measure what was selected by the keys and queries as they came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from modelled_request import Request
from small_models import GQA, small_config

from cache_rank.config import CacheRankConfig
from scripts.compare_selection import StepResult, base_config, main, replay
from scripts.shared.recordings import Recorded

PROMPT, STEPS = 50, 12


def recording(config: CacheRankConfig, repeats: bool) -> Recorded:
    """What a cache rank receives of one request, whose queries may stay the same."""
    request = Request(config, 1, PROMPT)
    queries, keys, values, _ = zip(*(request.compute() for _ in range(STEPS)), strict=True)
    decoded = torch.stack((torch.stack(keys, dim=2), torch.stack(values, dim=2)))
    kv = torch.cat((request.prompt.transpose(2, 3), decoded), dim=3)
    return Recorded(*kv, torch.stack(queries[:1] * STEPS if repeats else queries))


def results(repeats: bool, **policy: Any) -> list[StepResult]:
    config = small_config(GQA, **policy)
    return list(replay(base_config(config), recording(config, repeats)))


def test_a_query_that_repeats_selects_what_it_needs() -> None:
    found = results(repeats=True, max_swap_tokens=8)
    assert [step.recall for step in found] == [1.0] * len(found)
    assert all(0 < step.attention_mass <= 1 + 1e-6 for step in found)


def test_other_queries_need_other_tokens() -> None:
    found = results(repeats=False, max_swap_tokens=8)
    assert 0 < sum(step.recall for step in found) / len(found) < 0.9


@pytest.mark.parametrize(("window", "capacity", "steps"), [(4, 8, 5), (4, 1, 8), (7, 2, 8)])
def test_steps_count_from_where_window_and_slots_are_full(
    window: int, capacity: int, steps: int
) -> None:
    found = results(repeats=True, query_window=window, max_swap_tokens=capacity)
    assert len(found) == STEPS - steps


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no recorded decode step"):
        main(["--recording", str(tmp_path)])
