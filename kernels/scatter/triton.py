"""Scatter and copies of tokens, Triton: one launch for all layers, each a buffer of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cache_rank_kernels.scatter.reference import LayerBuffers, layer_buffers
from torch import Tensor

__all__ = ["LayerBuffers", "collect_tokens", "copy_tokens", "layer_buffers", "scatter_step"]

_BLOCK_ELEMENTS = 2048
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    """See the reference. D is a power of two."""
    rows, layers, kv_heads, capacity = entering_slots.shape
    head_dim = keys.shape[-1]
    assert entering_slots.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert header.is_contiguous()
    assert header.shape == (rows, 6)
    assert expected.is_contiguous()
    assert len(key_rows.tensors) == len(value_rows.tensors) == layers
    assert key_rows.tensors[0].shape[1:] == (kv_heads, head_dim)
    _scatter[(rows, layers * kv_heads)](
        key_rows.pointers,
        value_rows.pointers,
        first_rows,
        header,
        expected,
        entering_slots,
        keys,
        values,
        applied,
        applied if accepts is None else accepts,
        may_refuse=accepts is not None,
        layers=layers,
        kv_heads=kv_heads,
        capacity=capacity,
        head_dim=head_dim,
        block_entries=_block_rows(capacity, head_dim),
        dtype=_DTYPES[key_rows.tensors[0].dtype],
    )


def collect_tokens(
    key_rows: LayerBuffers, value_rows: LayerBuffers, rows: Tensor, out: Tensor
) -> None:
    """See the reference. D is a power of two."""
    _, kv_heads, head_dim = key_rows.tensors[0].shape
    count, layers = rows.shape[0], len(key_rows.tensors)
    assert rows.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == (2, layers, count, kv_heads, head_dim)
    assert out.dtype == key_rows.tensors[0].dtype
    block_heads = _block_rows(count * kv_heads, head_dim)
    _collect[(triton.cdiv(count * kv_heads, block_heads), layers, 2)](
        key_rows.pointers,
        value_rows.pointers,
        rows,
        out,
        count,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_heads=block_heads,
        dtype=_DTYPES[out.dtype],
    )


def copy_tokens(
    key_rows: LayerBuffers, value_rows: LayerBuffers, source: Tensor, target: Tensor
) -> None:
    """See the reference. D is a power of two."""
    _, kv_heads, head_dim = key_rows.tensors[0].shape
    count, layers = source.shape[0], len(key_rows.tensors)
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert target.shape == source.shape
    block_heads = _block_rows(count * kv_heads, head_dim)
    _copy[(triton.cdiv(count * kv_heads, block_heads), layers, 2)](
        key_rows.pointers,
        value_rows.pointers,
        source,
        target,
        count,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_heads=block_heads,
        dtype=_DTYPES[key_rows.tensors[0].dtype],
    )


def _block_rows(rows: int, head_dim: int) -> int:
    """How many vectors of D one program moves."""
    return max(1, min(_BLOCK_ELEMENTS // head_dim, int(triton.next_power_of_2(rows))))


@triton.jit
def _layer_buffer(pointers, layer, dtype: tl.constexpr):
    pointer = tl.load(pointers + layer).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16)  # see layer_buffers


@triton.jit(
    do_not_specialize_on_alignment=[
        "key_pointers",
        "value_pointers",
        "first_rows",
        "header",
        "expected",
        "entering_slots",
        "applied",
        "accepts",
    ]
)
def _scatter(
    key_pointers,
    value_pointers,
    first_rows,
    header,
    expected,
    entering_slots,
    keys,
    values,
    applied,
    accepts,
    may_refuse: tl.constexpr,
    layers: tl.constexpr,
    kv_heads: tl.constexpr,
    capacity: tl.constexpr,
    head_dim: tl.constexpr,
    block_entries: tl.constexpr,
    dtype: tl.constexpr,
):
    row, unit = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, 4)
    differs = tl.load(header + row * 6 + column) != tl.load(expected + row * 4 + column)
    first_row = tl.load(first_rows + row).to(tl.int64)
    applies = (tl.sum(differs.to(tl.int32), 0) == 0) & (first_row >= 0)
    if may_refuse:
        applies &= tl.load(accepts) != 0
    if unit == 0:
        tl.store(applied + row, applies.to(tl.int32))
    if not applies:
        return

    layer = unit // kv_heads
    layer_keys = _layer_buffer(key_pointers, layer, dtype)
    layer_values = _layer_buffer(value_pointers, layer, dtype)
    first_entry = (row.to(tl.int64) * layers * kv_heads + unit) * capacity
    dims = tl.arange(0, head_dim)[None, :]
    # Most entries are padding: it comes last, and what follows it is not looked at.
    if capacity > 0:
        block, ends = 0, 0
        while (block < capacity) & (ends == 0):
            entry = block + tl.arange(0, block_entries)
            slot = tl.load(entering_slots + first_entry + entry, mask=entry < capacity, other=-1)
            used = (slot >= 0)[:, None]
            source = (first_entry + entry)[:, None] * head_dim + dims
            target = ((first_row + slot) * kv_heads + unit % kv_heads)[:, None] * head_dim + dims
            key = tl.load(keys + source, mask=used)
            value = tl.load(values + source, mask=used)
            tl.store(layer_keys + target, key.to(dtype), mask=used)
            tl.store(layer_values + target, value.to(dtype), mask=used)
            block += block_entries
            ends = tl.max((slot < 0).to(tl.int32), 0)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["key_pointers", "value_pointers", "rows"],
)
def _collect(
    key_pointers,
    value_pointers,
    rows,
    out,
    count,
    layers: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
    dtype: tl.constexpr,
):
    layer, part = tl.program_id(1), tl.program_id(2)
    buffer = _layer_buffer(key_pointers if part == 0 else value_pointers, layer, dtype)
    index = tl.program_id(0) * block_heads + tl.arange(0, block_heads)  # of a head of a token
    used = index < count * kv_heads
    row = tl.load(rows + index // kv_heads, mask=used, other=0)
    dims = tl.arange(0, head_dim)[None, :]
    source = (row * kv_heads + index % kv_heads)[:, None] * head_dim + dims
    content = tl.load(buffer + source, mask=used[:, None])
    first = (part * layers + layer).to(tl.int64) * count * kv_heads
    tl.store(out + (first + index)[:, None] * head_dim + dims, content, mask=used[:, None])


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["key_pointers", "value_pointers", "source", "target"],
)
def _copy(
    key_pointers,
    value_pointers,
    source,
    target,
    count,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
    dtype: tl.constexpr,
):
    layer, part = tl.program_id(1), tl.program_id(2)
    buffer = _layer_buffer(key_pointers if part == 0 else value_pointers, layer, dtype)
    index = tl.program_id(0) * block_heads + tl.arange(0, block_heads)  # of a head of a token
    used = index < count * kv_heads
    head, token = index % kv_heads, index // kv_heads
    dims = tl.arange(0, head_dim)[None, :]
    from_row = tl.load(source + token, mask=used, other=0)
    to_row = tl.load(target + token, mask=used, other=0)
    from_row = (from_row * kv_heads + head)[:, None] * head_dim
    to_row = (to_row * kv_heads + head)[:, None] * head_dim
    content = tl.load(buffer + from_row + dims, mask=used[:, None])
    tl.store(buffer + to_row + dims, content, mask=used[:, None])
