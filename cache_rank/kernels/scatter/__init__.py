"""Shipped tokens go to their slots, and whole tokens are read, written and copied."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.scatter import reference

scatter_step = by_device(reference.scatter_step)
collect_tokens = by_device(reference.collect_tokens)
put_tokens = by_device(reference.put_tokens)
copy_tokens = by_device(reference.copy_tokens)
