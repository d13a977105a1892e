"""The operations of a step, Triton."""

from cache_rank.kernels.mosaickv.compressing import compress_buffers
from cache_rank.kernels.mosaickv.gathering import gather_packed
from cache_rank.kernels.mosaickv.scoring import score_packed_step

__all__ = ["compress_buffers", "gather_packed", "score_packed_step"]
