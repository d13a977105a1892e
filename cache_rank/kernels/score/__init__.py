"""Every cached token is scored for every kv head."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.score import reference
from cache_rank.kernels.score.reference import ScoreWorkspace


@by_device(reference.score_workspace)
def score_workspace() -> Callable[..., ScoreWorkspace]:
    from cache_rank.kernels.score import triton

    return triton.score_workspace


@by_device(reference.score_step)
def score_step() -> Callable[..., None]:
    from cache_rank.kernels.score import triton

    return triton.score_step
