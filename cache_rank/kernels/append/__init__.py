"""The newest tokens enter the paged pools."""

from cache_rank.kernels.append import reference
from cache_rank.kernels.by_device import by_device

append_step = by_device(reference.append_step)
load_tokens = by_device(reference.load_tokens)
