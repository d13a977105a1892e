"""K and V of tokens that enter working sets are read into a message."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.gather import reference


@by_device(reference.gather_step)
def gather_step() -> Callable[..., None]:
    from cache_rank.kernels.gather import triton

    return triton.gather_step
