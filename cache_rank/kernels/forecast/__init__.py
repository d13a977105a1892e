"""Queries of a layer group are forecast from a hidden state."""

from __future__ import annotations

from collections.abc import Callable

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.forecast import reference
from cache_rank.kernels.forecast.reference import ForecastWorkspace


@by_device(reference.forecast_workspace)
def forecast_workspace() -> Callable[..., ForecastWorkspace]:
    from cache_rank.kernels.forecast import triton

    return triton.forecast_workspace


@by_device(reference.forecast_step)
def forecast_step() -> Callable[..., None]:
    from cache_rank.kernels.forecast import triton

    return triton.forecast_step
