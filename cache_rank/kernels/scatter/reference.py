"""Shipped tokens go to their slots, and whole tokens are moved, plain torch: the specification.

A slot is a row of SGLang's KV pool. The pool has a buffer of its own for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.wire.reference import from_wire


class LayerBuffers(NamedTuple):
    """The buffers of all layers, as torch sees them and as one launch over all layers does.

    Attributes:
        tensors: (pool rows, Hkv, D) for each layer, contiguous, all of one shape, dtype and device.
        pointers: (layers,) int64 on the device of the tensors, the addresses of all of them.
    """

    tensors: list[Tensor]
    pointers: Tensor


def layer_buffers(tensors: Sequence[Tensor]) -> LayerBuffers:
    """Describe the buffers of at least one layer, (pool rows, Hkv, D) each.

    Raises:
        ValueError: the buffers differ in shape, dtype or device, are not contiguous, or do not
            begin at a multiple of 16 bytes on a GPU.
    """
    first = tensors[0]
    for tensor in tensors:
        if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
            raise ValueError("the buffers of the layers differ in shape, dtype or device")
        if not tensor.is_contiguous():
            raise ValueError("the buffer of a layer is not contiguous")
        if tensor.is_cuda and tensor.data_ptr() % 16:
            raise ValueError("the buffer of a layer does not begin at a multiple of 16 bytes")
    addresses = [tensor.data_ptr() for tensor in tensors]
    pointers = torch.tensor(addresses, dtype=torch.int64, device=first.device)
    return LayerBuffers(list(tensors), pointers)


def scatter_step(
    key_rows: LayerBuffers,
    value_rows: LayerBuffers,
    first_rows: Tensor,
    header: Tensor,
    expected: Tensor,
    entering_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    applied: Tensor,
    accepts: Tensor | None = None,
) -> None:
    """Write each shipped token's K and V into its slot, for all layers of a group.

    A row whose header is not the expected one is left alone: its answer is of another step, or of a
    request that has left.

    Args:
        key_rows, value_rows: L layers of (pool rows, Hkv, D), written in place.
        first_rows: (R,) integers, the pool row of slot 0 of each row; negative skips the row.
        header: (R, 6) int64, of which only the first four columns are compared.
        expected: (R, 4) int64, what those must be.
        entering_slots: (R, L, Hkv, C) int32, the slot of each token. Negative is padding, which
            comes last.
        keys, values: (R, L, Hkv, C, width) in the dtype of a message, see `to_wire`.
        applied: (R,) integers, written in place: 1 if the row was applied, else 0.
        accepts: (1,) int32; no row is applied when it is 0. None applies all that match.
    """
    matches = (header[:, :4] == expected).all(-1) & (first_rows >= 0)
    if accepts is not None:
        matches &= accepts != 0
    applied.copy_(matches)
    used = (entering_slots >= 0) & matches.view(-1, 1, 1, 1)
    for layer, (key_buffer, value_buffer) in enumerate(
        zip(key_rows.tensors, value_rows.tensors, strict=True)
    ):
        row, head, entry = used[:, layer].nonzero(as_tuple=True)
        pool_row = first_rows[row].to(torch.int64) + entering_slots[row, layer, head, entry]
        key_buffer[pool_row, head] = from_wire(keys[row, layer, head, entry], key_buffer.dtype)
        value_buffer[pool_row, head] = from_wire(
            values[row, layer, head, entry], value_buffer.dtype
        )


def collect_tokens(
    key_rows: LayerBuffers, value_rows: LayerBuffers, rows: Tensor, out: Tensor
) -> None:
    """Read whole tokens (all heads) of all layers.

    Args:
        key_rows, value_rows: (pool rows, Hkv, D) for each layer.
        rows: (n,) int64 pool rows.
        out: (2, layers, n, Hkv, D), contiguous, written in place: keys, then values.
    """
    for part, buffers in zip(out, (key_rows, value_rows), strict=True):
        for layer, buffer in enumerate(buffers.tensors):
            part[layer] = torch.index_select(buffer, 0, rows)


def put_tokens(
    key_rows: LayerBuffers, value_rows: LayerBuffers, rows: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Write whole tokens (all heads) of all layers.

    Args:
        key_rows, value_rows: (pool rows, Hkv, D) for each layer, written in place.
        rows: (n,) int64 pool rows. What is in one that is named twice is arbitrary.
        keys, values: (layers, Hkv, n, D), contiguous.
    """
    for tokens, buffers in ((keys, key_rows), (values, value_rows)):
        for layer, buffer in zip(tokens, buffers.tensors, strict=True):
            buffer.index_copy_(0, rows, layer.transpose(0, 1))


def copy_tokens(
    key_rows: LayerBuffers, value_rows: LayerBuffers, source: Tensor, target: Tensor
) -> None:
    """Copy whole tokens (all heads) between pool rows, for all layers.

    Args:
        key_rows, value_rows: (pool rows, Hkv, D) for each layer, written in place.
        source, target: (n,) int64 pool rows; none is in both.
    """
    for buffer in (*key_rows.tensors, *value_rows.tensors):
        buffer.index_copy_(0, target, torch.index_select(buffer, 0, source))
