"""The query of the next decode step is predicted from recent ones."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.predict import reference


@by_device(reference.predict_step)
def predict_step() -> Callable[..., None]:
    from cache_rank.kernels.predict import triton

    return triton.predict_step
