"""Where the packed vectors of a step's tokens are, plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from cache_rank_kernels.mosaickv.vectors import PackedVectors, bitmap_bytes
from torch import Tensor


class PackedStore(NamedTuple):
    """Tokens of all sequences, as the operations of a step find them.

    A sequence's tokens are in the pages from the first on, in whole buffers, each compressed by one
    of its strategies. Newer tokens, and copies of some others, are in a ring of its slot as they
    came; the token at position p at p % ring.

    Attributes:
        keys, values, block_keys: packed, (pages, layers, Hkv, entries, ...): of a page's P tokens
            the token at p has entry p % P, and the per-block key of a block that begins there
            p % P * entries // P.
        rings: keys and values, (slots, layers, Hkv, ring, D) each.
        strategy_of: (slots, buffers) int32, which of the sequence's strategies each buffer of
            tokens in the pages has; -1 for tokens that are not there.
        rows: (slots, strategies) int32, where each of them is in the two tables below.
        numbers: (rows, layers, 3) int32: r, g, and the tokens of a block.
        rotations: (rows, layers, 2, Hkv, D, C) in the dtype of the rings.
        page_tokens: P.
        buffer_tokens: of a buffer; divides the ring.
    """

    keys: PackedVectors
    values: PackedVectors
    block_keys: PackedVectors
    rings: tuple[Tensor, Tensor]
    strategy_of: Tensor
    rows: Tensor
    numbers: Tensor
    rotations: Tensor
    page_tokens: int
    buffer_tokens: int


class Strategy(NamedTuple):
    """How tokens of one layer are compressed.

    Attributes:
        kept: r, elements that each vector keeps.
        group: neighbouring elements that share a bit.
        block: tokens of a per-block key; 1 is none, and tokens are scored by themselves.
        rotations: (2, Hkv, D, C) of keys and of values, in the dtype of the pool.
    """

    kept: int
    group: int
    block: int
    rotations: Tensor


class Run(NamedTuple):
    """Successive tokens of one strategy, positions first to last - 1."""

    first: int
    last: int
    strategy: Strategy


def strategy_at(store: PackedStore, row: int, layer: int) -> Strategy:
    """The strategy of a layer that is in a row of the tables."""
    kept, group, block = store.numbers[row, layer].tolist()
    return Strategy(kept, group, block, store.rotations[row, layer])


def packed_tokens(store: PackedStore, slot: int, tokens: int) -> int:
    """How many of a sequence's first tokens are in the pages; the others are in the ring."""
    is_open = int(store.strategy_of[slot, 0]) >= 0
    return tokens // store.buffer_tokens * store.buffer_tokens if is_open else 0


def runs_of(store: PackedStore, slot: int, layer: int, packed: int, longest: int) -> Iterator[Run]:
    """The strategies of a layer's first `packed` tokens, in order.

    Args:
        store: that they are in.
        slot: of the sequence.
        layer: whose.
        packed: of `packed_tokens`.
        longest: tokens of a run, a multiple of the buffer.
    """
    first, size = 0, store.buffer_tokens
    for index, group in groupby(store.strategy_of[slot, : packed // size].tolist()):
        strategy = strategy_at(store, int(store.rows[slot, index]), layer)
        last = first + sum(size for _ in group)
        for start in range(first, last, longest):
            yield Run(start, min(start + longest, last), strategy)
        first = last


def newest_tokens(store: PackedStore, slot: int, layer: int, first: int, last: int) -> Tensor:
    """Tokens from the ring, as they came: (2, Hkv, last - first, D)."""
    position = torch.arange(first, last, device=store.strategy_of.device) % store.rings[0].shape[3]
    return torch.stack([ring[slot, layer][:, position] for ring in store.rings])


def load_vectors(
    store: PackedStore,
    vectors: PackedVectors,
    pages: Tensor,
    layer: int,
    head: Tensor,
    position: Tensor,
    strategy: Strategy,
) -> PackedVectors:
    """Vectors of a layer as a strategy packed them.

    Args:
        store: that they are in.
        vectors: its keys, values or per-block keys.
        pages: (pages,) int32 of the sequence.
        layer: of them.
        head, position: int64, which broadcast to the leading dimensions of the result.
        strategy: of them all.
    """
    place = _place(store, vectors, pages, layer, head, position)
    width = bitmap_bytes(strategy.rotations.shape[-1], strategy.group)
    return PackedVectors(
        vectors.elements[..., : strategy.kept][place], vectors.bitmap[..., :width][place]
    )


def store_vectors(
    store: PackedStore,
    vectors: PackedVectors,
    pages: Tensor,
    layer: int,
    head: Tensor,
    position: Tensor,
    packed: PackedVectors,
) -> None:
    """Write vectors that a strategy packed; arguments are those of `load_vectors`."""
    place = _place(store, vectors, pages, layer, head, position)
    for plane, part in zip(vectors, packed, strict=True):
        plane[..., : part.shape[-1]][place] = part


def _place(
    store: PackedStore,
    vectors: PackedVectors,
    pages: Tensor,
    layer: int,
    head: Tensor,
    position: Tensor,
) -> tuple[Tensor, int, Tensor, Tensor]:
    page_tokens, entries = store.page_tokens, vectors.elements.shape[-2]
    page = pages[position // page_tokens].to(torch.int64)
    return page, layer, head, position % page_tokens * entries // page_tokens
