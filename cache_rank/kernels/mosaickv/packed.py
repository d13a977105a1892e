"""What kernels of `mosaickv` have in common: sizes, where tokens are, and vectors unpacked, Triton.

Vectors are unpacked a word of a bitmap at a time. The place of an element among those of its vector
is how many bits are set before its own. The bits of earlier words are counted once a vector, and
those of its own word by one instruction of a GPU. Neighbouring threads read neighbouring channels,
and so elements that lie together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.mosaickv.reference import PackedStore, columns_for
from cache_rank.kernels.mosaickv.vectors import PackedVectors


class Layout(NamedTuple):
    """Sizes of a `PackedStore` that do not depend on how much memory there is.

    Attributes:
        layers, kv_heads, head_dim, ring: those of the rings.
        channels: C.
        columns: C, padded: see `columns_for`.
        part: how many channels are unpacked at once, at most those of a word of a bitmap.
        parts: how many times that is for all channels.
        kept, words: the elements, and the words of a bitmap, that a packed vector has room for.
        page: how many tokens a page holds.
        buffer: how many tokens are compressed together.
    """

    layers: int
    kv_heads: int
    head_dim: int
    ring: int
    channels: int
    columns: int
    part: int
    parts: int
    kept: int
    words: int
    page: int
    buffer: int

    @classmethod
    def of(cls, store: PackedStore) -> Layout:
        """The layout of a store, whose tensors must be contiguous."""
        for tensor in (*store.keys, *store.values, *store.rings, *store[3:7]):
            assert tensor.is_contiguous()
        _, layers, kv_heads, ring, head_dim = store.rings[0].shape
        channels, bitmap_bytes = store.rotations.shape[-1], store.keys.bitmap.shape[-1]
        columns = columns_for(channels)
        part = min(columns, 32)
        assert bitmap_bytes % 4 == 0
        assert ring % store.buffer_tokens == 0
        return cls(
            *(layers, kv_heads, head_dim, ring),
            *(channels, columns, part, -(-channels // part)),
            *(store.keys.elements.shape[-1], bitmap_bytes // 4),
            *(store.page_tokens, store.buffer_tokens),
        )


def in_words(vectors: PackedVectors) -> tuple[Tensor, Tensor]:
    """The elements and bitmaps of a store as `unpack_part` takes them; bitmaps are whole words."""
    return vectors.elements, vectors.bitmap.view(torch.int32)


@triton.jit
def tokens_in_pages(strategy_of, tokens, LAYOUT: tl.constexpr):
    """How many of a sequence's tokens are in the pages, from the strategies of its slot."""
    complete = tokens // LAYOUT.buffer * LAYOUT.buffer
    return tl.where(tl.load(strategy_of) >= 0, complete, 0)


@triton.jit
def run_at(unit_strategies, first, stop, BUFFERS: tl.constexpr, LAYOUT: tl.constexpr):
    """The strategy of token `first`, and the first token of another strategy, or `stop`."""
    strategy = tl.load(unit_strategies + first // LAYOUT.buffer)
    buffer = first // LAYOUT.buffer + tl.arange(0, BUFFERS)
    token = buffer * LAYOUT.buffer
    other = tl.load(unit_strategies + buffer, mask=token < stop, other=-1)
    return strategy, tl.min(tl.where((token < stop) & (other == strategy), stop, token))


@triton.jit
def _set_bits(words):
    """Count the bits of uint32 that are set; the compiler makes one instruction of this."""
    words -= (words >> 1) & 0x55555555
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return (((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def unpack_part(vectors, entry, used, word, before, index, group, LAYOUT: tl.constexpr):
    """Unpack some neighbouring channels of packed vectors.

    Args:
        vectors: what `in_words` returned.
        entry: (vectors,) int64, which vectors.
        used: (vectors,) whether there is one.
        word, before: (vectors,) uint32, returned for the part before; at first 0.
        index: which part, a constant.
        group: how many neighbouring elements share a bit, 1, 2 or 4.

    Returns:
        (vectors, LAYOUT.part) in the elements' dtype, 0 for what was not kept; and the state for
        the next part.
    """
    elements, bitmap = vectors
    exponent = group // 2  # group is 2 to this power
    before += tl.where(index % group == 0, _set_bits(word), 0)
    words = bitmap + entry * LAYOUT.words
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
