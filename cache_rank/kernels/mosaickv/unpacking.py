"""Vectors are unpacked in kernels of `mosaickv`, a word of a bitmap at a time, Triton.

The place of an element among those of its vector is how many bits are set before its own. The bits
of earlier words are counted once a vector, and those of its own word by one instruction of a GPU.
Neighbouring threads read neighbouring channels, and so elements that lie together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.mosaickv.vectors import PackedVectors


def in_words(vectors: PackedVectors) -> tuple[Tensor, Tensor]:
    """The elements and bitmaps of a store as `unpack_part` takes them; bitmaps are whole words."""
    return vectors.elements, vectors.bitmap.view(torch.int32)


@triton.jit
def _set_bits(words):
    """Count the bits of uint32 that are set; the compiler makes one instruction of this."""
    words -= (words >> 1) & 0x55555555
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return (((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def no_word(entry):
    """The state of `unpack_part` before the first part: a word, and the count of bits before it."""
    word = tl.zeros(entry.shape, tl.uint32)
    return word, word


@triton.jit
def unpack_part(vectors, entry, used, word, before, index, group, LAYOUT: tl.constexpr):
    """Unpack some neighbouring channels of packed vectors.

    Args:
        vectors: what `in_words` returned.
        entry: (vectors,) int64, which vectors.
        used: (vectors,) whether there is one.
        word, before: (vectors,) uint32, returned for the part before; at first those of `no_word`.
        index: which part, a constant.
        group: how many neighbouring elements share a bit, 1, 2 or 4.

    Returns:
        (vectors, LAYOUT.part) in the elements' dtype, 0 for what was not kept; and the state for
        the next part.
    """
    elements, bitmap = vectors
    exponent = group // 2  # group is 2 to this power
    before += tl.where(index % group == 0, _set_bits(word), 0)
    words = bitmap + entry * (LAYOUT.bytes // 4)
    word = tl.load(words + (index >> exponent), mask=used, other=0).to(tl.uint32, bitcast=True)

    channel = index * LAYOUT.part + tl.arange(0, LAYOUT.part)
    bit = tl.full(channel.shape, 1, tl.uint32) << ((channel >> exponent) & 31).to(tl.uint32)
    rank = _set_bits(word[:, None] & (bit - 1)[None, :]) * group.to(tl.uint32)
    rank += (channel & (group - 1)).to(tl.uint32)[None, :]
    bit = tl.where(channel < LAYOUT.channels, bit, 0)
    # Pointers are advanced a vector at a time: each addition of one takes two instructions.
    first = elements + entry * LAYOUT.kept + before * group.to(tl.uint32)
    is_kept = (word[:, None] & bit[None, :]) != 0
    return tl.load(first[:, None] + rank, mask=is_kept, other=0.0), word, before
