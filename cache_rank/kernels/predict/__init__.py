"""The query of the next decode step is predicted from recent ones."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.predict import reference

predict_step = by_device(reference.predict_step)
