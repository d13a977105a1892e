"""The newest tokens enter the paged pools, plain torch: the specification.

The KV cache of the cache rank lies in pages, which a page table lists for each sequence. A decode
step appends one token a row; a shipment brings many of one sequence, or some of several.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.kernels.rows import PagedRows, Shipment


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


def load_tokens(shipment: Shipment, key_pool: Tensor, value_pool: Tensor) -> None:
    """Store consecutive tokens of each row, for all layers.

    Args:
        shipment: what is stored. Positions beyond a row's pages start them again, as in
            `append_step`, and the newest tokens stay.
        key_pool, value_pool: (pages, layers, Hkv, P, D), written in place.
    """
    page_tokens, width = key_pool.shape[3], shipment.rows.page_table.shape[1]
    for row, (_, position, first, count) in enumerate(shipment.on_host):
        skipped = max(0, count - width * page_tokens)
        positions = torch.arange(position + skipped, position + count, device=key_pool.device)
        entries = positions // page_tokens % width
        page = shipment.rows.page_table[row, entries].to(torch.int64)
        offset = positions % page_tokens
        tokens = shipment.tokens[:, :, first + skipped : first + count]
        keys, values = tokens.transpose(1, 2)  # (n, layers, Hkv, D) each
        key_pool[page, :, :, offset] = keys.to(key_pool.dtype)
        value_pool[page, :, :, offset] = values.to(value_pool.dtype)
