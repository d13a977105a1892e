"""The operations of a step, Triton: `packing` and `unpacking` are what they have in common."""

from cache_rank.kernels.mosaickv.compressing import add_covariance, compress_buffers
from cache_rank.kernels.mosaickv.gathering import gather_packed
from cache_rank.kernels.mosaickv.scoring import score_packed_step, score_packed_workspace

__all__ = [
    "add_covariance",
    "compress_buffers",
    "gather_packed",
    "score_packed_step",
    "score_packed_workspace",
]
