"""The operations of `mosaickv` (MosaicKV sections 4.2, 5.3, 5.4), plain torch: the specification.

Tokens are in a `PackedStore`, as packed vectors, which `vectors` specifies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cache_rank.kernels.mosaickv.store import (
    PackedStore,
    load_vectors,
    newest_tokens,
    packed_tokens,
    runs_of,
    store_vectors,
    strategy_at,
)
from cache_rank.kernels.mosaickv.vectors import decode, lost_energy, score_packed
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.wire.reference import to_wire

_DECODED_TOKENS = 512
"""This many tokens are decoded at once, each beside a copy of its rotation."""


def add_covariance(
    store: PackedStore, slot: int, layers: range, first: int, last: int, covariance: Tensor
) -> None:
    """Add tokens x from the ring to covariances, the sums of xᵀx (section 5.5).

    Tokens [first, last) are whole buffers. Each is summed up by itself, and then added, so that no
    bit depends on how many come at once. Covariances are (layers, 2, Hkv, D, D) float64.
    """
    for layer in layers:
        for start in range(first, last, store.buffer_tokens):
            tokens = newest_tokens(store, slot, layer, start, start + store.buffer_tokens).double()
            covariance[layer] += tokens.transpose(-1, -2) @ tokens


def compress_buffers(
    store: PackedStore,
    pages: Tensor,
    slot: int,
    row: int,
    layers: range,
    first: int,
    last: int,
    losses: Tensor,
) -> None:
    """Compress tokens [first, last), whole buffers, from the ring of a slot to pages.

    The strategy is at `row` of the tables. To `losses`, (layers,) float64, is added, buffer after
    buffer, the sum over tokens of the share of energy that their vectors lose on average.
    """
    for layer in layers:
        strategy = strategy_at(store, row, layer)
        for start in range(first, last, store.buffer_tokens):
            tokens = newest_tokens(store, slot, layer, start, start + store.buffer_tokens)
            packed = strategy.compress(tokens)
            store_vectors(store, pages, layer, start, packed)
            losses[layer] += lost_energy(tokens, packed).mean(dim=(0, 1)).sum()


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
    page_table, slots, positions = rows
    used = (entering >= 0) & (slots >= 0).view(-1, 1, 1, 1)
    for row, index in used.flatten(2).any(dim=-1).nonzero().tolist():
        head, entry = used[row, index].nonzero(as_tuple=True)
        found = _read_layer(
            store,
            page_table[row],
            int(slots[row]),
            first_layer + index,
            int(positions[row]) + 1,
            head,
            entering[row, index, head, entry].to(torch.int64),
        )
        for out, part in zip((out_keys, out_values), found, strict=True):
            out[row, index, head, entry] = to_wire(part, out.dtype)


def _read_layer(
    store: PackedStore,
    pages: Tensor,
    slot: int,
    layer: int,
    tokens: int,
    head: Tensor,
    position: Tensor,
) -> Tensor:
    """Read tokens of a layer, each at a head and position of its own: (2, n, D)."""
    ring, dtype = store.rings[0].shape[3], store.rings[0].dtype
    packed, largest = packed_tokens(store, slot, tokens), torch.finfo(dtype).max
    out = torch.stack([of[slot, layer, head, position % ring] for of in store.rings])
    strategies = store.strategy_of[slot, position // store.buffer_tokens]
    strategies = torch.where(position < packed, strategies, -1)
    for index in strategies.unique().tolist():
        if index < 0:
            continue
        strategy = strategy_at(store, int(store.rows[slot, index]), layer)
        for part in (strategies == index).nonzero().squeeze(-1).split(_DECODED_TOKENS):
            # One product a token, so that no bit of it depends on what else is asked for.
            of_token = head[part].unsqueeze(-1), position[part].unsqueeze(-1)
            for side, vectors in enumerate((store.keys, store.values)):
                coded = load_vectors(store, vectors, pages, layer, *of_token, strategy)
                decoded = decode(coded, strategy.rotations[side, head[part]], strategy.group)
                out[side, part] = decoded.squeeze(1).clamp(-largest, largest).to(dtype)
    return out


def score_packed_workspace(
    store: PackedStore,
    rows: int,
    layers: int,
    group: int,
    capacity: int,
    strategies: int,
    device: torch.device,
) -> Any:
    """Make scratch for rows of up to `capacity` tokens and `strategies` strategies: none."""
    return None


def score_packed_step(
    store: PackedStore,
    queries: Tensor,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: Any,
    out: Tensor,
) -> None:
    """Score the resident tokens of every row of a step.

    Each is scored by its own key. The paper scores blocks of tokens first (section 4.2, stage 2).
    Arguments are as for `score_step` of score/reference.py.
    """
    page_table, slots, positions = rows
    grouped = queries.unflatten(2, (out.shape[2], -1))  # (R, L, Hkv, G, D)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        resident = position + 1
        for index in range(queries.shape[1] if slot >= 0 else 0):
            logits = _logits(
                store,
                grouped[row, index],
                page_table[row],
                slot,
                first_layer + index,
                resident,
                scale,
            )
            # The largest log-probability over the heads of a group.
            out[row, index, :, :resident] = torch.log_softmax(logits, dim=-1).amax(dim=-2)


def _logits(
    store: PackedStore,
    queries: Tensor,
    pages: Tensor,
    slot: int,
    layer: int,
    resident: int,
    scale: float,
) -> Tensor:
    """Logits of a sequence's first tokens, (Hkv, G, resident), with queries (Hkv, G, D)."""
    packed, logits = packed_tokens(store, slot, resident), []
    head = torch.arange(queries.shape[0], device=queries.device).unsqueeze(-1)
    for first, last, strategy in runs_of(store, slot, layer, packed):
        position = torch.arange(first, last, device=queries.device)
        keys = load_vectors(store, store.keys, pages, layer, head, position, strategy)
        logits.append(score_packed(queries, keys, strategy.rotations[0], strategy.group, scale))
    if packed < resident:
        newest = newest_tokens(store, slot, layer, packed, resident)[0].float()
        logits.append((queries @ newest.transpose(-1, -2)) * scale)
    return torch.cat(logits, dim=-1)
