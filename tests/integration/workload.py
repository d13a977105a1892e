"""Flags and prompts that integration tests share."""

from __future__ import annotations

import random

VOCABULARY = 300

SMALL_CACHE_RANK = (
    "--sink-tokens 4 --recent-tokens 8 --layers-per-group 2 --query-window 4 "
    "--max-sparse-requests 8 --bulk-chunk-tokens 64 --recall-interval 8 "
    "--max-total-tokens 20000 --enable-metrics --dtype float32"
).split()


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    source = random.Random(seed)
    return [[source.randrange(5, VOCABULARY - 5) for _ in range(length)] for length in lengths]
