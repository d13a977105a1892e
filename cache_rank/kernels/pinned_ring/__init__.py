"""Rings of pinned memory between a host and its GPU."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.pinned_ring import reference

collect = by_device(reference.collect)
post = by_device(reference.post)
