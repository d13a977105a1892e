"""Scores decide which tokens sit in slots."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.select import reference


@by_device(reference.select_workspace)
def select_workspace() -> Callable[..., Tensor]:
    from cache_rank.kernels.select import triton

    return triton.select_workspace


@by_device(reference.select_step)
def select_step() -> Callable[..., None]:
    from cache_rank.kernels.select import triton

    return triton.select_step
