"""The operations of `mosaickv` (MosaicKV sections 4.2, 5.3, 5.4), plain torch: the specification.

Tokens are in a `PackedStore`, as packed vectors, which `vectors` specifies.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.coded.reference import by_kv_head, by_query
from cache_rank.kernels.mosaickv.vectors import (
    PackedVectors,
    Strategy,
    decode,
    lost_energy,
    score_packed,
    unpack_vectors,
)
from cache_rank.kernels.newest.reference import merge
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score.reference import ScoreWorkspace
from cache_rank.kernels.wire.reference import to_wire

_DECODED_TOKENS = 512
"""This many tokens are decoded at once, each beside a copy of its rotation."""


class PackedStore(NamedTuple):
    """The tokens of all sequences, as the operations of a step find them.

    A sequence's tokens are in the pages from the first on, in whole buffers. Each buffer is
    compressed by one of the sequence's strategies. Newer tokens, and copies of some others, are as
    they came in a ring of the sequence's slot, position p in entry p % ring.

    Attributes:
        keys, values: packed vectors, (pages, layers, Hkv, P, ...) each, where position p has entry
            p % P. Each has room for the most elements and bits that any strategy may need.
        rings: keys and values, (slots, layers, Hkv, ring, D) each.
        strategy_of: (slots, buffers) int32, the strategy of each buffer in the pages, counted among
            those of the sequence; -1 for buffers that are not there.
        rows: (slots, strategies) int32, the row of each strategy in the next two tables.
        numbers: (rows, layers, 2) int32: r and g.
        rotations: (rows, layers, 2, Hkv, D, C) in the dtype of the rings.
        page_tokens: P.
        buffer_tokens: how many tokens a buffer has; divides the ring and P.
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

    def strategy(self, row: int, layer: int) -> Strategy:
        """The strategy of a layer in a row of the tables."""
        kept, group = self.numbers[row, layer].tolist()
        return Strategy(kept, group, self.rotations[row, layer])

    def packed_tokens(self, slot: Tensor | int, tokens: Tensor | int) -> Tensor:
        """How many of a sequence's first tokens are in the pages; the others are in the ring."""
        return (
            (self.strategy_of[slot, 0] >= 0) * (tokens // self.buffer_tokens) * self.buffer_tokens
        )

    def runs(self, slot: int, layer: int, tokens: int) -> list[tuple[int, int, Strategy]]:
        """The runs [first, last) of a layer's tokens in the pages that have one strategy."""
        first, size, found = 0, self.buffer_tokens, []
        buffers = int(self.packed_tokens(slot, tokens)) // size
        for index, group in groupby(self.strategy_of[slot, :buffers].tolist()):
            last = first + size * len(list(group))
            found.append((first, last, self.strategy(int(self.rows[slot, index]), layer)))
            first = last
        return found

    def packed(
        self, vectors: PackedVectors, pages: Tensor, layer: int, first: int, last: int
    ) -> PackedVectors:
        """Packed keys or values of a sequence's tokens [first, last), (Hkv, last - first, ...)."""
        position = torch.arange(first, last, device=pages.device)
        head = torch.arange(self.rings[0].shape[2], device=pages.device).unsqueeze(-1)
        page = pages[position // self.page_tokens].to(torch.int64)
        place = (page, layer, head, position % self.page_tokens)
        return PackedVectors(*(plane[place] for plane in vectors))

    def newest(self, slot: int, layers: int | slice, first: int, last: int) -> Tensor:
        """Tokens [first, last) as they came: of a layer (2, Hkv, last - first, D)."""
        entry = torch.arange(first, last, device=self.rows.device) % self.rings[0].shape[3]
        return torch.stack([ring[slot, layers][..., entry, :] for ring in self.rings])


class PackedWorkspace(NamedTuple):
    """Scratch of `score_packed_step`, of which the reference needs none.

    Units are rows, layers and kv heads. Columns are C, padded, see `columns_for`.

    Attributes:
        of_tokens: the scratch that all formats need.
        exact: (units, strategies, G, columns) float32, queries in the frame of each strategy.
        parts: (units, strategies, PARTS * PADDED, columns) in the dtype that keys are multiplied
            in, see `load_query_parts`.
        weights: (units, strategies, PARTS * PADDED) float32, the weights of the parts.
    """

    of_tokens: ScoreWorkspace
    exact: Tensor
    parts: Tensor
    weights: Tensor


def packed_workspace(
    store: PackedStore, of_tokens: ScoreWorkspace, units: int, group: int, strategies: int
) -> PackedWorkspace:
    """Add to the scratch of scores what packed keys take, for `group` query heads of a KV head."""
    ring, padded = store.rings[0], of_tokens.partial.shape[-1]  # 0 without a GPU
    rows = (units, strategies, max(4 * padded, 16) if padded else 0)  # see `score_constants`
    columns = columns_for(store.rotations.shape[-1])
    return PackedWorkspace(
        of_tokens,
        of_tokens.partial.new_empty((units, strategies, group if padded else 0, columns)),
        ring.new_empty((*rows, columns), dtype=ring.dtype if ring.is_cuda else torch.float32),
        of_tokens.partial.new_empty(rows),
    )


def columns_for(channels: int) -> int:
    """How many channels a vector has in a kernel: a power of two, for a product at least 16."""
    return max(16, 1 << (channels - 1).bit_length())


def compress_buffers(
    store: PackedStore,
    pages: Tensor,
    slot: int,
    row: int,
    layers: range,
    first: int,
    last: int,
    losses: Tensor | None = None,
) -> None:
    """Compress tokens [first, last), whole buffers, from the ring of a slot to pages.

    The strategy is at `row` of the tables. To `losses`, (buffers, layers, 2, Hkv) float64, is
    written the sum over each buffer's tokens of the share of energy that their vectors lose. No bit
    depends on how many buffers come at once.
    """
    size = store.buffer_tokens
    for layer in layers:
        strategy = store.strategy(row, layer)
        for index, start in enumerate(range(first, last, size)):
            tokens = store.newest(slot, layer, start, start + size)
            packed = strategy.compress(tokens)
            page, entry = int(pages[start // store.page_tokens]), start % store.page_tokens
            for side, vectors in enumerate((store.keys, store.values)):
                for plane, part in zip(vectors, packed, strict=True):
                    target = plane[page, layer, :, entry : entry + size]
                    target[..., : part.shape[-1]] = part[side]
            if losses is not None:
                losses[index, layer] = lost_energy(tokens, packed).sum(dim=-1)


def gather_packed(
    store: PackedStore,
    rows: PagedRows,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Read K and V of the tokens that enter the working sets, decoded where they are packed.

    It is `gather_step` of gather/reference.py, in the dtype of the rings or another of a message.
    """
    # Of each entering token: which it is, where it is, and how it was packed.
    used = (entering >= 0) & (rows.slots >= 0).view(-1, 1, 1, 1)
    row, index, head, entry = used.nonzero(as_tuple=True)
    position, slot = entering[used].to(torch.int64), rows.slots[row].to(torch.int64)
    layer = first_layer + index
    is_packed = position < store.packed_tokens(slot, rows.positions[row].to(torch.int64) + 1)
    page = rows.page_table[row, position // store.page_tokens].to(torch.int64)
    place = (page, layer, head, position % store.page_tokens)
    strategy = store.strategy_of[slot, position // store.buffer_tokens].to(torch.int64)
    table = store.rows[slot, strategy].to(torch.int64)
    group = store.numbers[table, layer, 1] * is_packed
    for side, (vectors, ring, out) in enumerate(
        zip((store.keys, store.values), store.rings, (out_keys, out_values), strict=True)
    ):
        tokens = ring[slot, layer, head, position % ring.shape[3]]
        largest = torch.finfo(tokens.dtype).max
        for size in set(group.tolist()) - {0}:
            for part in (group == size).nonzero().squeeze(-1).split(_DECODED_TOKENS):
                # One product a token, so that no bit of it depends on what else is asked for.
                of_part = tuple(numbers[part].unsqueeze(-1) for numbers in place)
                packed = PackedVectors(*(plane[of_part] for plane in vectors))
                rotation = store.rotations[table[part], layer[part], side, head[part]]
                decoded = decode(packed, rotation, size).squeeze(1)
                tokens[part] = decoded.clamp(-largest, largest).to(tokens.dtype)
        out[row, index, head, entry] = to_wire(tokens, out.dtype)


def score_packed_step(
    store: PackedStore,
    queries: Tensor,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: PackedWorkspace,
    out: Tensor,
) -> None:
    """Score the resident tokens of every row of a step.

    Each is scored by its own key. The paper scores blocks of tokens first (section 4.2, stage 2).
    Arguments are as for `score_step` of score/reference.py.
    """
    _, layers, kv_heads, _ = out.shape
    grouped = queries.unflatten(2, (kv_heads, -1))  # (R, L, Hkv, G, D)
    for row, slot, newest in rows.used():
        for index in range(layers):
            layer, of_heads, logits = first_layer + index, grouped[row, index], []
            last = 0
            for first, last, strategy in store.runs(slot, layer, newest + 1):
                keys = store.packed(store.keys, rows.page_table[row], layer, first, last)
                rotation = strategy.rotations[0]
                logits.append(score_packed(of_heads, keys, rotation, strategy.group, scale))
            exact = store.newest(slot, layer, last, newest + 1)[0].float()
            logits.append((of_heads @ exact.transpose(-1, -2)) * scale)
            # The largest log-probability over the heads of a group.
            log_probabilities = torch.log_softmax(torch.cat(logits, dim=-1), dim=-1)
            out[row, index, :, : newest + 1] = log_probabilities.amax(dim=-2)


def attend_packed(
    store: PackedStore, queries: Tensor, rows: PagedRows, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the tokens of every row that are packed (PackedAttention, section 5.3).

    Values are added up in the frame of their strategy, and each run's sum is rotated back once. It
    is `attend_codes` of coded/reference.py, with the same arguments and results.
    """
    grouped = by_kv_head(queries, store.rings[0].shape[2])
    out, log_sums = torch.zeros_like(grouped), torch.full_like(grouped[..., 0], -torch.inf)
    for row, slot, newest in rows.used():
        for first, last, strategy in store.runs(slot, layer, newest + 1):
            keys, values = (
                store.packed(vectors, rows.page_table[row], layer, first, last)
                for vectors in (store.keys, store.values)
            )
            (of_keys, of_values), group = strategy.rotations, strategy.group
            logits = score_packed(grouped[row], keys, of_keys, group, scale)
            of_run = logits.logsumexp(dim=-1)
            weights = (logits - of_run.unsqueeze(-1)).exp()
            rotated = weights @ unpack_vectors(values, of_values.shape[-1], group)
            run = (rotated @ of_values.float().mT, of_run)
            out[row], log_sums[row] = merge(run, (out[row], log_sums[row]))
    return by_query(out, queries), by_query(log_sums, queries)
