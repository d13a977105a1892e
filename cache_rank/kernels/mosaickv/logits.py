"""Logits of packed vectors that have one strategy, Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from cache_rank.kernels.mosaickv.unpacking import no_word, unpack_part
from cache_rank.kernels.score.triton import store_logits


@triton.jit
def run_at(unit_strategies, first, stop, BUFFERS: tl.constexpr, LAYOUT: tl.constexpr):
    """The strategy of token `first`, and the first token of another strategy, or `stop`."""
    strategy = tl.load(unit_strategies + first // LAYOUT.buffer)
    buffer = first // LAYOUT.buffer + tl.arange(0, BUFFERS)
    token = buffer * LAYOUT.buffer
    other = tl.load(unit_strategies + buffer, mask=token < stop, other=-1)
    return strategy, tl.min(tl.where((token < stop) & (other == strategy), stop, token))


@triton.jit
def load_queries(parts, weights, strategy, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """Load a unit's queries for a strategy: (part, COUNT) of each part, and (COUNT,) weights."""
    row = strategy * COUNT + tl.arange(0, COUNT)
    at = row[None, :] * LAYOUT.columns + tl.arange(0, LAYOUT.part)[:, None]
    CHANNEL_PARTS: tl.constexpr = LAYOUT.parts
    found = (tl.load(parts + at),)
    for part in tl.static_range(1, CHANNEL_PARTS):
        more = tl.load(parts + at + part * LAYOUT.part)
        # Triton unpacks no tuples.
        found = found + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return found, tl.load(weights + row)


@triton.jit
def score_vectors(
    vectors,
    first,
    last,
    pages,
    layer,
    head,
    group,
    queries,
    weight,
    unit_logits,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    VECTORS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write the logits of packed keys that have one strategy.

    Args:
        vectors: the keys, see `in_words`.
        first, last: the tokens [first, last).
        pages: the pages of the sequence.
        layer, head: which keys.
        group: the element group of the strategy.
        queries, weight: what `load_queries` returned; the scale is in the weight.
        unit_logits: (capacity, PADDED), scratch of the unit.
        VECTORS: how many vectors are multiplied at once.
        EXACT: whether they are multiplied as float32.
    """
    DTYPE: tl.constexpr = tl.float32 if EXACT else vectors[0].dtype.element_ty
    CHANNEL_PARTS: tl.constexpr = LAYOUT.parts
    for begin in range(first, last, VECTORS):
        # Which tokens, and where their vectors are.
        token = begin + tl.arange(0, VECTORS)
        used = token < last
        page = tl.load(pages + token // LAYOUT.page, mask=used, other=0).to(tl.int64)
        tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
        entry = tile * LAYOUT.page + token % LAYOUT.page
        # Products, some channels after the other: [VECTORS, PARTS * PADDED]
        product = tl.zeros((VECTORS, PARTS * PADDED), tl.float32)
        word, before = no_word(entry)
        for part in tl.static_range(CHANNEL_PARTS):
            key, word, before = unpack_part(vectors, entry, used, word, before, part, group, LAYOUT)
            product = tl.dot(key.to(DTYPE), queries[part], product, input_precision="ieee")
        weighted = tl.reshape(product * weight[None, :], (VECTORS, PARTS, PADDED))
        store_logits(tl.sum(weighted, axis=1), token, used, unit_logits, PADDED)
