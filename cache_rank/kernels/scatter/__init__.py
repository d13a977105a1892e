"""Shipped tokens go to their slots, and tokens are copied."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.scatter import reference


@by_device(reference.scatter_step)
def scatter_step() -> Callable[..., None]:
    from cache_rank.kernels.scatter import triton

    return triton.scatter_step


@by_device(reference.collect_tokens)
def collect_tokens() -> Callable[..., None]:
    from cache_rank.kernels.scatter import triton

    return triton.collect_tokens


@by_device(reference.copy_tokens)
def copy_tokens() -> Callable[..., None]:
    from cache_rank.kernels.scatter import triton

    return triton.copy_tokens
