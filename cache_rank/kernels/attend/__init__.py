"""Attention of a decode step over rows of the KV pool."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.attend import reference
from cache_rank.kernels.by_device import by_device


@by_device(reference.attend_rows)
def attend_rows() -> Callable[..., None]:
    from cache_rank.kernels.attend import triton

    return triton.attend_rows
