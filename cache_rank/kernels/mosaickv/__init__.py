"""Packed vectors of rotated keys and values: compressed, scored, gathered and attended to.

vectors         rotations and packed vectors, plain torch
reference       where the tokens of a step are, and the operations of a step
triton          the same for GPUs; `scoring`, `attending`; `packed`: what kernels have in common
"""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.mosaickv import reference

attend_packed = by_device(reference.attend_packed)
compress_buffers = by_device(reference.compress_buffers)
gather_packed = by_device(reference.gather_packed)
score_packed_step = by_device(reference.score_packed_step)
