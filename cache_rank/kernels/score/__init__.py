"""Every cached token is scored for every kv head."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.score import reference

score_workspace = by_device(reference.score_workspace)
score_step = by_device(reference.score_step)
