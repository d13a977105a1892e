"""Where the packed vectors of a step's tokens are, plain torch: the specification."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.mosaickv.vectors import PackedVectors, bitmap_bytes, encode


class PackedStore(NamedTuple):
    """The tokens of all sequences, as the operations of a step find them.

    A sequence's tokens are in the pages from the first on, in whole buffers. Each buffer is
    compressed by one of the sequence's strategies. Newer tokens, and copies of some others, are as
    they came in a ring of the sequence's slot, position p in entry p % ring.

    Attributes:
        keys, values: packed vectors, (pages, layers, Hkv, P, ...) each, where position p has entry
            p % P.
        rings: keys and values, (slots, layers, Hkv, ring, D) each.
        strategy_of: (slots, buffers) int32, the strategy of each buffer in the pages, counted among
            those of the sequence; -1 for buffers that are not there.
        rows: (slots, strategies) int32, the row of each strategy in the next two tables.
        numbers: (rows, layers, 2) int32: r and g.
        rotations: (rows, layers, 2, Hkv, D, C) in the dtype of the rings.
        page_tokens: P.
        buffer_tokens: how many tokens a buffer has; divides the ring.
    """

    keys: PackedVectors
    values: PackedVectors
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
        kept: r, how many elements each vector keeps.
        group: g, how many neighbouring elements share a bit.
        rotations: (2, Hkv, D, C), those of keys and of values, in the dtype of the rings.
    """

    kept: int
    group: int
    rotations: Tensor

    def compress(self, tokens: Tensor) -> PackedVectors:
        """Compress keys and values, (2, Hkv, n, D)."""
        sides = [  # one after the other, because sorting a long segment takes memory
            encode(part, rotation, self.kept, self.group)
            for part, rotation in zip(tokens, self.rotations, strict=True)
        ]
        return PackedVectors(*map(torch.stack, zip(*sides, strict=True)))


def strategy_at(store: PackedStore, row: int, layer: int) -> Strategy:
    """Read the strategy of a layer from a row of the tables."""
    kept, group = store.numbers[row, layer].tolist()
    return Strategy(kept, group, store.rotations[row, layer])


def packed_tokens(store: PackedStore, slot: int, tokens: int) -> int:
    """How many of a sequence's first tokens are in the pages; the others are in the ring."""
    is_open = int(store.strategy_of[slot, 0]) >= 0
    return tokens // store.buffer_tokens * store.buffer_tokens if is_open else 0


def runs_of(
    store: PackedStore, slot: int, layer: int, packed: int
) -> Iterator[tuple[int, int, Strategy]]:
    """List the runs of a layer's first `packed` tokens: tokens [first, last) of one strategy."""
    first, size = 0, store.buffer_tokens
    for index, group in groupby(store.strategy_of[slot, : packed // size].tolist()):
        last = first + sum(size for _ in group)
        yield first, last, strategy_at(store, int(store.rows[slot, index]), layer)
        first = last


def newest_tokens(store: PackedStore, slot: int, layer: int, first: int, last: int) -> Tensor:
    """Read tokens from the ring, as they came: (2, Hkv, last - first, D)."""
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
    """Load vectors, the store's keys or values, of a layer as one strategy packed them.

    Heads and positions broadcast to the leading dimensions of the result.
    """
    place = _place(store, pages, layer, head, position)
    width = bitmap_bytes(strategy.rotations.shape[-1], strategy.group)
    return PackedVectors(
        vectors.elements[..., : strategy.kept][place], vectors.bitmap[..., :width][place]
    )


def store_vectors(
    store: PackedStore, pages: Tensor, layer: int, first: int, packed: PackedVectors
) -> None:
    """Write successive tokens of a layer, (2, Hkv, n, ...), the first of them at a position."""
    _, kv_heads, count = packed.elements.shape[:3]
    head = torch.arange(kv_heads, device=pages.device).unsqueeze(-1)
    position = torch.arange(first, first + count, device=pages.device)
    place = _place(store, pages, layer, head, position)
    for side, vectors in enumerate((store.keys, store.values)):
        for plane, part in zip(vectors, packed, strict=True):
            plane[..., : part.shape[-1]][place] = part[side]


def _place(
    store: PackedStore, pages: Tensor, layer: int, head: Tensor, position: Tensor
) -> tuple[Tensor, int, Tensor, Tensor]:
    """The index of each vector in the planes of keys and of values."""
    page = pages[position // store.page_tokens].to(torch.int64)
    return page, layer, head, position % store.page_tokens
