"""Steps of a cache rank are timed without channels."""

from __future__ import annotations

import pytest
import torch

from cache_rank.config import CacheRankConfig, ModelShape, ScoreKeys
from scripts.speed.cache_step import measure_cache_step


class TestCacheStep:
    @pytest.mark.parametrize("score_keys", ["resident", "sketch"])
    def test_steps_are_timed_once_the_slots_are_full(self, score_keys: ScoreKeys) -> None:
        model = ModelShape(4, 4, 2, 32, "float32", 0.25)
        config = CacheRankConfig(
            model,
            layers_per_group=3,
            sparse_budget=40,
            hysteresis=0,
            max_swap_tokens=16,
            max_rows=2,
            score_keys=score_keys,
        )
        found = measure_cache_step(config, 512, 5, torch.device("cpu"))
        assert len(found) == 5
        assert min(found) > 0
