"""Attention to packed vectors (PackedAttention, MosaicKV section 5.3), Triton.

A program attends to a part of the tokens of a row and KV head. For each strategy among them it
rotates the queries, adds up values in that frame, and rotates the sums back once. The parts are
merged by their log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.coded.attending import LEAST_QUERIES, attend_grouped, empty_splits
from cache_rank.kernels.coded.tokens import place_in_pages
from cache_rank.kernels.mosaickv.packed import (
    Layout,
    in_words,
    run_at,
    tokens_in_pages,
    unpack_part,
)
from cache_rank.kernels.mosaickv.reference import PackedStore
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score.triton import multiplies_float32

_WINDOW = 4096
"""The end of a strategy is looked for among so many tokens at once."""

_REGISTERS = 168
"""A thread has this many, so that three programs, which wait for memory, share a multiprocessor."""


def attend_packed(
    store: PackedStore, queries: Tensor, rows: PagedRows, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See the reference. Two launches for every LEAST_QUERIES queries of a KV head.

    Registers hold two sums of values for each query, before they are rotated back and after.
    """
    layout, exact = Layout.of(store), multiplies_float32(store.rings[0])

    def launch(grouped: Tensor) -> tuple[Tensor, Tensor]:
        partial, log_sums = empty_splits(grouped, programs=3)
        _attend[(grouped.shape[0] * layout.kv_heads, partial.shape[3])](
            grouped,
            in_words(store.keys),
            in_words(store.values),
            (store.strategy_of, store.rows, store.numbers, store.rotations),
            *rows,
            partial,
            log_sums,
            layer=layer,
            scale=scale * 1.4426950408889634,  # powers of two are faster than those of e
            page_stride=rows.page_table.stride(0),
            buffers=store.strategy_of.shape[1],
            in_table=store.rows.shape[1],
            GROUP=grouped.shape[2],
            PADDED=LEAST_QUERIES,
            WINDOW=_WINDOW,
            LAYOUT=layout,
            EXACT=exact,
            maxnreg=_REGISTERS if layout.head_dim <= 128 else None,
        )
        return partial, log_sums

    return attend_grouped(queries, layout.kv_heads, LEAST_QUERIES, launch)


@triton.jit
def _load_rotation(rotation, part, LAYOUT: tl.constexpr):
    """Load a part of the columns of a rotation, (D, part) float32."""
    channel = (part * LAYOUT.part + tl.arange(0, LAYOUT.part))[None, :]
    at = tl.arange(0, LAYOUT.head_dim)[:, None] * LAYOUT.channels + channel
    return tl.load(rotation + at, mask=channel < LAYOUT.channels, other=0.0).to(tl.float32)


@triton.jit
def _unpack(vectors, entry, group, LAYOUT: tl.constexpr):
    """Unpack all channels of packed vectors: (vectors, part) of each part."""
    used = entry >= 0
    PARTS: tl.constexpr = LAYOUT.parts
    none = tl.zeros(entry.shape, tl.uint32)
    found, word, before = unpack_part(vectors, entry, used, none, none, 0, group, LAYOUT)
    parts = (found,)
    for part in tl.static_range(1, PARTS):
        found, word, before = unpack_part(vectors, entry, used, word, before, part, group, LAYOUT)
        # Triton unpacks no tuples.
        parts = parts + (found,)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@triton.jit(
    do_not_specialize=["layer", "scale", "page_stride", "buffers", "in_table"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _attend(
    queries,
    keys,
    values,
    tables,
    page_table,
    slots,
    positions,
    partial,
    log_sums,
    layer,
    scale,
    page_stride,
    buffers,
    in_table,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program attends to a part of the packed tokens of one row and KV head.

    Args:
        queries: (R, Hkv, GROUP, D) float32.
        scale: factor on the logits, of powers of two.
        partial, log_sums: see `merge_by_query`.
    """
    # Which tokens.
    strategy_of, rows, numbers, rotations = tables
    unit, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, head = unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    slot = tl.load(slots + row).to(tl.int64)
    tokens = tl.where(slot < 0, 0, tl.load(positions + row) + 1)
    slot = tl.maximum(slot, 0)
    unit_strategies, pages = strategy_of + slot * buffers, page_table + row * page_stride
    packed = tokens_in_pages(unit_strategies, tokens, LAYOUT) // LAYOUT.buffer
    first = packed * split // splits * LAYOUT.buffer
    stop = packed * (split + 1) // splits * LAYOUT.buffer

    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    BUFFER: tl.constexpr = LAYOUT.buffer
    PART: tl.constexpr = LAYOUT.part
    PARTS: tl.constexpr = LAYOUT.parts
    MATRIX: tl.constexpr = HEAD_DIM * LAYOUT.channels
    DTYPE: tl.constexpr = tl.float32 if EXACT else rotations.dtype.element_ty
    ROUNDING: tl.constexpr = "ieee" if EXACT else "tf32"
    column, dims = tl.arange(0, PADDED), tl.arange(0, HEAD_DIM)
    at = (unit * GROUP + column[None, :]) * HEAD_DIM + dims[:, None]
    query = tl.load(queries + at, mask=(column < GROUP)[None, :], other=0.0) * scale  # [D, PADDED]
    out = tl.zeros((HEAD_DIM, PADDED), tl.float32)
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    while first < stop:
        # A run of one strategy: queries in its frame, (part, PADDED) each.
        until = tl.minimum(stop, first + WINDOW)
        strategy, last = run_at(unit_strategies, first, until, WINDOW // BUFFER, LAYOUT)
        table = tl.load(rows + slot * in_table + strategy).to(tl.int64) * LAYOUT.layers + layer
        group = tl.load(numbers + table * 2 + 1)
        of_keys = rotations + (table * 2 * LAYOUT.kv_heads + head) * MATRIX
        of_values = of_keys + LAYOUT.kv_heads * MATRIX
        rotated = [
            tl.dot(
                tl.trans(_load_rotation(of_keys, i, LAYOUT)), query, input_precision=ROUNDING
            ).to(DTYPE)
            for i in (0, 1, 2, 3, 4, 5, 6, 7)[:PARTS]
        ]
        before_run = largest
        sums = [tl.zeros((PART, PADDED), tl.float32) for _ in (0, 1, 2, 3, 4, 5, 6, 7)[:PARTS]]
        for begin in range(first, last, BUFFER):
            entry = place_in_pages(pages, begin, layer, head, LAYOUT) + tl.arange(0, BUFFER)
            key = _unpack(keys, entry, group, LAYOUT)
            logits = tl.zeros((BUFFER, PADDED), tl.float32)
            for i in tl.static_range(PARTS):
                logits = tl.dot(key[i].to(DTYPE), rotated[i], logits, input_precision="ieee")
            before, largest = largest, tl.maximum(largest, tl.max(logits, axis=0))
            weights = tl.exp2(logits - largest[None, :])
            decay = tl.exp2(before - largest)
            total = total * decay + tl.sum(weights, axis=0)
            weights = weights.to(DTYPE)
            value = _unpack(values, entry, group, LAYOUT)
            sums = [
                tl.dot(
                    tl.trans(value[i]).to(DTYPE),
                    weights,
                    sums[i] * decay[None, :],
                    input_precision="ieee",
                )
                for i in (0, 1, 2, 3, 4, 5, 6, 7)[:PARTS]
            ]
        # What the run adds, rotated back.
        out *= tl.exp2(before_run - largest)[None, :]
        for i in tl.static_range(PARTS):
            rotation = _load_rotation(of_values, i, LAYOUT)
            out = tl.dot(rotation, sums[i], out, input_precision=ROUNDING)
        first = last
    at = (unit * GROUP + column) * splits + split
    some = tl.maximum(total, 1e-30)
    target = partial + at[None, :] * HEAD_DIM + dims[:, None]
    tl.store(target, out / some[None, :], mask=(column < GROUP)[None, :])
    log_sum = tl.where(total > 0.0, largest + tl.log2(some), -1e30)
    tl.store(log_sums + at, log_sum, mask=column < GROUP)
