"""Tokens that enter a working set are read from the paged pools, plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.wire.reference import to_wire


def gather_step(
    key_pool: Tensor,
    value_pool: Tensor,
    rows: PagedRows,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Read K and V of the tokens that enter the working sets.

    Args:
        key_pool, value_pool: (pages, layers, Hkv, P, D).
        rows: the rows of the step.
        first_layer: index of the group's first layer in the pools.
        entering: (R, L, Hkv, C) int32 token positions; negative is padding.
        out_keys, out_values: (R, L, Hkv, C, width) in the dtype of the pools or in another of a
            message, see `to_wire`; written in place. Entries of padding and of skipped rows keep
            what they hold.
    """
    page_tokens = key_pool.shape[3]
    used = (entering >= 0) & (rows.slots >= 0).view(-1, 1, 1, 1)
    row, layer, head, entry = used.nonzero(as_tuple=True)
    position = entering[row, layer, head, entry].to(torch.int64)
    page = rows.page_table[row, position // page_tokens].to(torch.int64)
    source = (page, layer + first_layer, head, position % page_tokens)
    out_keys[row, layer, head, entry] = to_wire(key_pool[source], out_keys.dtype)
    out_values[row, layer, head, entry] = to_wire(value_pool[source], out_values.dtype)
