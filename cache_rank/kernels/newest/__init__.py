"""Attention to the newest tokens, which are few and as they came, merged with that to older ones.

A verification has two kinds: tokens of a ring, which are no codes yet, and those of its own round.
"""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.newest import reference

attend_to_each_other = by_device(reference.attend_to_each_other)
attend_to_ring = by_device(reference.attend_to_ring)
