"""The newest tokens enter the paged pools, plain torch: the specification.

The KV cache of the cache rank lies in pages, which a page table lists for each sequence. A decode
step appends one token a row; a shipment of a prefill brings many tokens of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.kernels.rows import PagedRows


def append_step(
    up: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    query_ring: Tensor,
    rows: PagedRows,
    first_layer: int,
) -> None:
    """Store the newest query, key and value of every row, for the layers of a group.

    Args:
        up: (R, L, Hq + 2 Hkv, D), per row and layer the query heads, then the key heads, then the
            value heads; contiguous but for the rows.
        key_pool, value_pool: (pages, layers, Hkv, P, D), written in place.
        query_ring: (slots, layers, Hq, W + 1, D), written in place; position p takes entry
            p % (W + 1).
        rows: the rows of the step. Positions beyond the table start it again, so that a table of
            one page turns that page into a ring of the newest tokens.
        first_layer: index of the group's first layer in the pools and the ring.
    """
    page_table, slots, positions = rows
    row = (slots >= 0).nonzero().squeeze(-1)
    position = positions[row].to(torch.int64)
    slot = slots[row].to(torch.int64)
    query_heads, ring = query_ring.shape[2:4]
    kv_heads, page_tokens = key_pool.shape[2:4]
    page = page_table[row, position // page_tokens % page_table.shape[1]].to(torch.int64)
    layer = torch.arange(first_layer, first_layer + up.shape[1], device=up.device)

    tokens = up[row]  # (rows, L, Hq + 2 Hkv, D)
    queries, keys = tokens[:, :, :query_heads], tokens[:, :, query_heads : query_heads + kv_heads]
    values = tokens[:, :, query_heads + kv_heads :]
    offset = (position % page_tokens).unsqueeze(-1)
    entry = (position % ring).unsqueeze(-1)
    query_ring[slot.unsqueeze(-1), layer, :, entry] = queries.to(query_ring.dtype)
    key_pool[page.unsqueeze(-1), layer, :, offset] = keys.to(key_pool.dtype)
    value_pool[page.unsqueeze(-1), layer, :, offset] = values.to(value_pool.dtype)


def load_tokens(
    shipment: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    pages: Tensor,
    start: int,
) -> None:
    """Store consecutive tokens of one sequence, for all layers.

    Args:
        shipment: (2, layers, n, Hkv, D), keys and values.
        key_pool, value_pool: (pages, layers, Hkv, P, D), written in place.
        pages: (pages of the sequence,) int32, in order. Positions beyond them start them again, as
            in `append_step`, and the newest tokens stay.
        start: position of the first token.
    """
    page_tokens = key_pool.shape[3]
    stop = start + shipment.shape[2]
    first = max(start, stop - pages.shape[0] * page_tokens)
    positions = torch.arange(first, stop, device=shipment.device)
    page = pages[positions // page_tokens % pages.shape[0]].to(torch.int64)
    offset = positions % page_tokens
    keys, values = shipment[:, :, first - start :].transpose(1, 2)  # (n, layers, Hkv, D) each
    key_pool[page, :, :, offset] = keys.to(key_pool.dtype)
    value_pool[page, :, :, offset] = values.to(value_pool.dtype)
