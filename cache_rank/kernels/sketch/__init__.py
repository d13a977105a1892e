"""Small copies of keys, which scores read."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.sketch import reference


@by_device(reference.append_codes)
def append_codes() -> Callable[..., None]:
    from cache_rank.kernels.sketch import triton

    return triton.append_codes


@by_device(reference.load_codes)
def load_codes() -> Callable[..., None]:
    from cache_rank.kernels.sketch import triton

    return triton.load_codes


@by_device(reference.score_sketch)
def score_sketch() -> Callable[..., None]:
    from cache_rank.kernels.sketch import triton

    return triton.score_sketch
