"""K and V of tokens that enter working sets are read into a message."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.gather import reference

gather_step = by_device(reference.gather_step)
