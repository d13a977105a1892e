"""Scores decide which tokens sit in slots."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.select import reference

select_workspace = by_device(reference.select_workspace)
select_step = by_device(reference.select_step)
