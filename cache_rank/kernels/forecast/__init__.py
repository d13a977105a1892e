"""Queries of a layer group are forecast from a hidden state."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.forecast import reference

forecast_workspace = by_device(reference.forecast_workspace)
forecast_step = by_device(reference.forecast_step)
