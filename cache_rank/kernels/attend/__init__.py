"""Attention of a decode step over rows of the KV pool."""

from cache_rank.kernels.attend import reference
from cache_rank.kernels.by_device import by_device

attend_rows = by_device(reference.attend_rows)
