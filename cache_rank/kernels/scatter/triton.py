"""Shipped tokens go to their slots, and whole tokens are moved: one launch for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.scatter.reference import LayerBuffers
from cache_rank.kernels.wire import triton as wire
from cache_rank.kernels.wire.reference import wire_width

_BLOCK_ELEMENTS = 2048
"""A program moves at most this many elements at a time."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What Triton calls the dtypes of pools."""


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
    head_dim = key_rows.tensors[0].shape[-1]
    assert entering_slots.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.shape == values.shape
    assert keys.shape == (*entering_slots.shape, wire_width(head_dim, keys.dtype))
    assert header.is_contiguous()
    assert header.shape == (rows, 6)
    assert expected.is_contiguous()
    assert len(key_rows.tensors) == len(value_rows.tensors) == layers
    assert key_rows.tensors[0].shape[1] == kv_heads
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
        MAY_REFUSE=accepts is not None,
        LAYERS=layers,
        KV_HEADS=kv_heads,
        CAPACITY=capacity,
        HEAD_DIM=head_dim,
        BLOCK_ENTRIES=min(_block_rows(head_dim), triton.next_power_of_2(capacity)),
        DTYPE=_DTYPES[key_rows.tensors[0].dtype],
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
    block_heads = _block_rows(head_dim)
    _collect[(triton.cdiv(count * kv_heads, block_heads), layers, 2)](
        key_rows.pointers,
        value_rows.pointers,
        rows,
        out,
        count,
        LAYERS=layers,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        DTYPE=_DTYPES[out.dtype],
    )


def put_tokens(
    key_rows: LayerBuffers, value_rows: LayerBuffers, rows: Tensor, keys: Tensor, values: Tensor
) -> None:
    """See the reference. D is a power of two."""
    _, kv_heads, head_dim = key_rows.tensors[0].shape
    count, layers = rows.shape[0], len(key_rows.tensors)
    assert rows.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.shape == values.shape == (layers, kv_heads, count, head_dim)
    assert keys.dtype == values.dtype == key_rows.tensors[0].dtype
    block_heads = _block_rows(head_dim)
    _put[(triton.cdiv(count * kv_heads, block_heads), layers, 2)](
        key_rows.pointers,
        value_rows.pointers,
        rows,
        keys,
        values,
        count,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        DTYPE=_DTYPES[keys.dtype],
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
    block_heads = _block_rows(head_dim)
    _copy[(triton.cdiv(count * kv_heads, block_heads), layers, 2)](
        key_rows.pointers,
        value_rows.pointers,
        source,
        target,
        count,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        DTYPE=_DTYPES[key_rows.tensors[0].dtype],
    )


def _block_rows(head_dim: int) -> int:
    """How many vectors of D one program moves at a time, of however many: one kernel serves all."""
    return max(1, _BLOCK_ELEMENTS // head_dim)


@triton.jit
def _layer_buffer(pointers, layer, DTYPE: tl.constexpr):
    """The buffer of a layer, which begins at a multiple of 16 bytes; see `layer_buffers`."""
    pointer = tl.load(pointers + layer).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16)


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
    MAY_REFUSE: tl.constexpr,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One program writes the shipped tokens of one row, layer and kv head to their slots."""
    # Whether the answer is the one that is expected.
    row, unit = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, 4)
    differs = tl.load(header + row * 6 + column) != tl.load(expected + row * 4 + column)
    first_row = tl.load(first_rows + row).to(tl.int64)
    applies = (tl.sum(differs.to(tl.int32), 0) == 0) & (first_row >= 0)
    if MAY_REFUSE:
        applies &= tl.load(accepts) != 0
    if unit == 0:
        tl.store(applied + row, applies.to(tl.int32))
    if not applies:
        return

    # Where the tokens come from and go to.
    layer = unit // KV_HEADS
    layer_keys = _layer_buffer(key_pointers, layer, DTYPE)
    layer_values = _layer_buffer(value_pointers, layer, DTYPE)
    first_entry = (row.to(tl.int64) * LAYERS * KV_HEADS + unit) * CAPACITY
    dims = tl.arange(0, HEAD_DIM)[None, :]
    # Block after block, up to the first padding: most entries are padding, which comes last.
    if CAPACITY > 0:
        block, ends = 0, 0
        while (block < CAPACITY) & (ends == 0):
            entry = block + tl.arange(0, BLOCK_ENTRIES)
            slot = tl.load(entering_slots + first_entry + entry, mask=entry < CAPACITY, other=-1)
            used = slot >= 0
            target = ((first_row + slot) * KV_HEADS + unit % KV_HEADS)[:, None] * HEAD_DIM + dims
            # [BLOCK_ENTRIES, D]
            key = wire.load_tokens(keys, first_entry + entry, used, HEAD_DIM, DTYPE)
            value = wire.load_tokens(values, first_entry + entry, used, HEAD_DIM, DTYPE)
            tl.store(layer_keys + target, key, mask=used[:, None])
            tl.store(layer_values + target, value, mask=used[:, None])
            block += BLOCK_ENTRIES
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
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One program reads BLOCK_HEADS heads of tokens, keys or values, in one layer."""
    layer, part = tl.program_id(1), tl.program_id(2)
    buffer = _layer_buffer(key_pointers if part == 0 else value_pointers, layer, DTYPE)
    index = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # counts heads of tokens
    used = index < count * KV_HEADS
    row = tl.load(rows + index // KV_HEADS, mask=used, other=0)
    dims = tl.arange(0, HEAD_DIM)[None, :]
    source = (row * KV_HEADS + index % KV_HEADS)[:, None] * HEAD_DIM + dims
    content = tl.load(buffer + source, mask=used[:, None])
    first = (part * LAYERS + layer).to(tl.int64) * count * KV_HEADS
    tl.store(out + (first + index)[:, None] * HEAD_DIM + dims, content, mask=used[:, None])


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["key_pointers", "value_pointers", "rows"],
)
def _put(
    key_pointers,
    value_pointers,
    rows,
    keys,
    values,
    count,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One program writes BLOCK_HEADS heads of tokens, keys or values, in one layer."""
    layer, part = tl.program_id(1), tl.program_id(2)
    buffer = _layer_buffer(key_pointers if part == 0 else value_pointers, layer, DTYPE)
    tokens = keys if part == 0 else values
    index = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # counts heads of tokens
    used = index < count * KV_HEADS
    head, token = index % KV_HEADS, index // KV_HEADS
    row = tl.load(rows + token, mask=used, other=0)
    dims = tl.arange(0, HEAD_DIM)[None, :]
    source = ((layer * KV_HEADS + head).to(tl.int64) * count + token)[:, None] * HEAD_DIM + dims
    target = (row * KV_HEADS + head)[:, None] * HEAD_DIM + dims
    tl.store(buffer + target, tl.load(tokens + source, mask=used[:, None]), mask=used[:, None])


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
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One program copies BLOCK_HEADS heads of tokens, keys or values, in one layer."""
    layer, part = tl.program_id(1), tl.program_id(2)
    buffer = _layer_buffer(key_pointers if part == 0 else value_pointers, layer, DTYPE)
    index = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # counts heads of tokens
    used = index < count * KV_HEADS
    head, token = index % KV_HEADS, index // KV_HEADS
    dims = tl.arange(0, HEAD_DIM)[None, :]
    from_row = tl.load(source + token, mask=used, other=0)
    to_row = tl.load(target + token, mask=used, other=0)
    from_row = (from_row * KV_HEADS + head)[:, None] * HEAD_DIM
    to_row = (to_row * KV_HEADS + head)[:, None] * HEAD_DIM
    content = tl.load(buffer + from_row + dims, mask=used[:, None])
    tl.store(buffer + to_row + dims, content, mask=used[:, None])
