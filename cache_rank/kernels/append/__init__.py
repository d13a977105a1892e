"""The newest tokens enter the paged pools."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.append import reference
from cache_rank.kernels.by_device import by_device


@by_device(reference.append_step)
def append_step() -> Callable[..., None]:
    from cache_rank.kernels.append import triton

    return triton.append_step


@by_device(reference.load_tokens)
def load_tokens() -> Callable[..., None]:
    from cache_rank.kernels.append import triton

    return triton.load_tokens
