"""A layer's q, k and v are packed into the message to the cache rank: the specification."""

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
            then the key heads, then the value heads.
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


def stamp(stamps: Tensor, index: int) -> None:
    """Store the time in nanoseconds: that of the GPU's global timer, or of the system's clock.

    Args:
        stamps: int64, on the device; entry `index` is written.
        index: the entry of `stamps`.
    """
    stamps.view(-1)[index] = time.time_ns()
