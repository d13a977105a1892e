"""What a layer computes is packed into the message to the cache rank: the specification."""

from __future__ import annotations

import time

import torch
from torch import Tensor


def pack_layer(
    staging: Tensor,
    exchange_index: Tensor,
    layer_in_group: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    stamps: Tensor | None = None,
    stamp_index: int = 0,
) -> None:
    """Write the rows of a batch that take part in the exchange to their rows of the message.

    Args:
        staging: (max rows, L, Hq + 2 Hkv, D), written in place: per row and layer the query heads,
            then the key heads, then the value heads; contiguous but for the rows.
        exchange_index: (B,) integer, the message row of each batch row, no two the same; negative
            skips the batch row.
        layer_in_group: the layer of the message that is written.
        queries: (B, Hq, D), any strides but the last.
        keys, values: (B, Hkv, D), any strides but the last.
        stamps: int64; entry `stamp_index` is set to the time in nanoseconds (see `stamp`). None
            sets none.
        stamp_index: the entry of `stamps`.
    """
    taken = (exchange_index >= 0).nonzero().squeeze(-1)
    packed = torch.cat((queries[taken], keys[taken], values[taken]), dim=1)
    staging[exchange_index[taken].to(torch.int64), layer_in_group] = packed.to(staging.dtype)
    if stamps is not None:
        stamp(stamps, stamp_index)


def pack_hidden(
    staging: Tensor, exchange_index: Tensor, hidden: Tensor, residual: Tensor | None
) -> None:
    """Write the hidden state that enters a layer to the message, of the rows that take part.

    Args:
        staging: (max rows, H), written in place; contiguous but for the rows.
        exchange_index: (B,) integer, see `pack_layer`.
        hidden: (B, H), contiguous but for the rows.
        residual: (B, H), likewise, which is added; None is zero.
    """
    taken = (exchange_index >= 0).nonzero().squeeze(-1)
    state = hidden[taken].float()
    if residual is not None:
        state = state + residual[taken].float()
    staging[exchange_index[taken].to(torch.int64)] = state.to(staging.dtype)


def stamp(stamps: Tensor, index: int) -> None:
    """Store the time in nanoseconds: by the GPU's global timer, or the host's monotonic clock.

    Args:
        stamps: int64, on the device; entry `index` is written.
        index: the entry of `stamps`.
    """
    stamps.view(-1)[index] = time.monotonic_ns()
