"""The operations of `mosaickv`, Triton.

Whole segments are packed here, and their rotations are found in `eigenvectors`. What every step
does is in `compressing`, `scoring` and `gathering`, which use `packing` and `unpacking`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.mosaickv.compressing import add_covariance, compress_buffers
from cache_rank.kernels.mosaickv.eigenvectors import rotation_of
from cache_rank.kernels.mosaickv.gathering import gather_packed
from cache_rank.kernels.mosaickv.packing import columns_for, pack_rows
from cache_rank.kernels.mosaickv.scoring import score_packed_step, score_packed_workspace
from cache_rank.kernels.mosaickv.vectors import PackedVectors, bitmap_bytes

__all__ = [
    "add_covariance",
    "compress_buffers",
    "gather_packed",
    "pack_vectors",
    "rotation_of",
    "score_packed_step",
    "score_packed_workspace",
]

_BLOCK_VECTORS = 32
"""A program packs this many vectors; a matrix unit takes at least 16."""


def pack_vectors(rotated: Tensor, kept: int, group: int, dtype: torch.dtype) -> PackedVectors:
    """See the reference: the same bits."""
    channels = rotated.shape[-1]
    assert rotated.is_contiguous()
    assert rotated.dtype == torch.float32
    assert kept % group == 0
    assert channels % group == 0
    width = bitmap_bytes(channels, group)
    elements = torch.empty((*rotated.shape[:-1], kept), dtype=dtype, device=rotated.device)
    bitmap = torch.empty((*rotated.shape[:-1], width), dtype=torch.uint8, device=rotated.device)
    count = rotated.shape[:-1].numel()
    _pack[(triton.cdiv(count, _BLOCK_VECTORS),)](
        rotated,
        elements,
        bitmap,
        count,
        kept,
        group,
        width,
        limit=torch.finfo(dtype).max,
        CHANNELS=channels,
        COLUMNS=columns_for(channels),
        VECTORS=_BLOCK_VECTORS,
        enable_fp_fusion=False,  # groups of the same energy as in the reference
    )
    return PackedVectors(elements, bitmap)


@triton.jit(do_not_specialize=["count", "kept", "group", "width", "limit"])
def _pack(
    rotated,
    elements,
    bitmap,
    count,
    kept,
    group,
    width,
    limit,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """One program packs VECTORS vectors of CHANNELS channels."""
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    targets = (elements, bitmap, vector * kept, vector * width, width)
    pack_rows(
        rotated,
        vector,
        vector < count,
        targets,
        kept,
        group,
        limit,
        CHANNELS=CHANNELS,
        STRIDE=CHANNELS,
        COLUMNS=COLUMNS,
    )
