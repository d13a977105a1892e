"""Which tokens a decode step attends to, as rows of the KV pool."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.pick import reference


@by_device(reference.pick_tokens)
def pick_tokens() -> Callable[..., None]:
    from cache_rank.kernels.pick import triton

    return triton.pick_tokens
