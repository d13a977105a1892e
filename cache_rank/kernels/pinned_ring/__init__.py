"""Rings of pinned memory between a host and its GPU."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.pinned_ring import reference


@by_device(reference.collect)
def collect() -> Callable[..., None]:
    from cache_rank.kernels.pinned_ring import triton

    return triton.collect


@by_device(reference.post)
def post() -> Callable[..., None]:
    from cache_rank.kernels.pinned_ring import triton

    return triton.post
