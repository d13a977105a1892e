"""Scatter of shipped tokens into the slots of a working set, plain torch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scatter_tokens(
    key_buffers: Sequence[Tensor],
    value_buffers: Sequence[Tensor],
    first_rows: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Write each shipped token's K and V into its slot, for all layers of a group.

    Args:
        key_buffers, value_buffers: per layer (rows, Hkv, D), written in place.
        first_rows: (R,) int64, the pool row of slot 0 of each request; negative skips the request.
        slots: (R, L, Hkv, C) integer, the slot of each token; negative is padding.
        keys, values: (R, L, Hkv, C, D).
    """
    used = (slots >= 0) & (first_rows >= 0).view(-1, 1, 1, 1)
    for layer, (key_buffer, value_buffer) in enumerate(
        zip(key_buffers, value_buffers, strict=True)
    ):
        request, head, entry = used[:, layer].nonzero(as_tuple=True)
        row = first_rows[request] + slots[request, layer, head, entry]
        key_buffer[row, head] = keys[request, layer, head, entry].to(key_buffer.dtype)
        value_buffer[row, head] = values[request, layer, head, entry].to(value_buffer.dtype)


def copy_tokens(
    key_buffers: Sequence[Tensor], value_buffers: Sequence[Tensor], source: Tensor, target: Tensor
) -> None:
    """Copy whole tokens (all heads) between pool rows, for all layers.

    Args:
        key_buffers, value_buffers: per layer (rows, Hkv, D), written in place.
        source, target: (n,) int64 rows, disjoint.
    """
    for buffer in (*key_buffers, *value_buffers):
        buffer.index_copy_(0, target, torch.index_select(buffer, 0, source))
