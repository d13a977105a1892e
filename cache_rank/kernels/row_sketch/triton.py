"""Sketches in rows of SGLang's KV pool are written, and tokens are selected by them, Triton.

What a key becomes, and what queries make of it, is that of kernels/sketch; only where sketches lie
differs. Queries weigh elements; logits are written, in bytes, and what each chunk of tokens adds to
the log-sum-exp; picking.py picks by them. A unit is a request and a KV head.

All of it may be captured in a graph: grids depend on capacities alone, and a program that has
nothing to do ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.dependent import has_dependents, let_dependents_start
from cache_rank.kernels.row_sketch.picking import pick_by_logits
from cache_rank.kernels.row_sketch.reference import KEY_MOST, KEY_UNIT, TILE, RowScratch
from cache_rank.kernels.sketch.encoding import BLOCK_KEYS, encode_block, encode_grid
from cache_rank.kernels.sketch.products import (
    columns_of_head,
    load_weights,
    logits_of,
    weigh_elements,
)
from cache_rank.kernels.sketch.reference import Sketch, SketchShape
from cache_rank.kernels.sketch.triton import Launch

LAUNCH = Launch(block=64, chunk=1024, warps=2, stages=5)
"""How logits are spread over a GPU.

A block waits for its rows and then for the sketches in them, so that five stages are two blocks of
each under way. Programs of less than four warps multiply by instructions of a warp, whose results
nobody has to wait for.
"""

_BYTES_READ = 64
"""Memory is read in pieces of so many bytes.

Requests that decode together take turns in the pool's rows, and the neighbours of a token's sketch
are those of its other heads. So a program scores as many heads as fill a piece."""

_MOST_QUERIES = 16
"""Of several KV heads, a program has at most so many query heads, whose sums are in registers."""

_STEPS, _KEY_MOST = tl.constexpr(float(KEY_UNIT)), tl.constexpr(KEY_MOST)
_LOG2_OF_STEP = tl.constexpr(1.4426950408889634 / KEY_UNIT)

_MOST_SCALE = tl.constexpr(4.0)
"""Of weights of larger units, 127 nats an element, logits count as smaller: they fit 22 bits."""

_NO_LOGIT = tl.constexpr(-4.0e6)
"""Fewer steps than any logit has."""

_INTEGER = tl.constexpr(12582912.0)
"""1.5 · 2^23. The bits of a float32 that is this and a number are those of this and an integer."""

_INTEGER_BITS = tl.constexpr(0x4B400000)


def encode_rows(
    keys: Tensor, rows: Tensor, sketch: Sketch, shape: SketchShape, codes: Tensor
) -> None:
    """See the reference. One launch; D is a power of two."""
    count, kv_heads, head_dim = keys.shape
    assert keys.stride(2) == 1
    assert rows.stride(0) == 1
    assert len(rows) == count
    assert codes.is_contiguous()
    assert codes.shape[1:] == (kv_heads, shape.bytes)
    assert sketch.keys.is_contiguous()
    assert sketch.keys.shape == (1, kv_heads, shape.channels, head_dim)
    _encode[encode_grid(count, kv_heads, shape)](
        keys,
        sketch.keys,
        sketch.shift,
        rows,
        codes,
        count,
        *keys.stride()[:2],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        FINE=shape.fine,
        COARSE=shape.coarse,
        SIZE=shape.bytes,
        BLOCK=BLOCK_KEYS,
    )


def select_rows(
    queries: Tensor,
    codes: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    budgets: Tensor,
    scale: float,
    sinks: int,
    recent: int,
    scratch: RowScratch,
    out: Tensor,
) -> None:
    """See the reference. Four launches; D is a power of two, and G is at most 16."""
    requests, query_heads, head_dim = queries.shape
    kv_heads, size = codes.shape[1:]
    group, capacity = query_heads // kv_heads, scratch.logits.shape[2]
    padded = triton.next_power_of_2(group)
    units, chunks = requests * kv_heads, triton.cdiv(capacity, LAUNCH.chunk)
    assert recent >= 1  # the current token is not scored
    assert size == shape.bytes
    assert sketch.queries.shape == (1, kv_heads, 4 * size, head_dim)
    assert codes.is_contiguous()
    assert out.is_contiguous()
    assert row_table.stride(1) == 1
    assert len(scratch.keys) >= units
    assert scratch.sums.shape[1:] == (chunks, 2, padded)
    assert capacity % LAUNCH.block == 0  # logits are stored by the block

    of_one_layer = queries.unsqueeze(1)
    weigh_elements(of_one_layer, sketch, 0, scale, scratch.weights)
    heads = _heads_at_once(kv_heads, size, padded)
    width = max(32, triton.next_power_of_2(heads * size))  # the matrix unit takes 32 bytes at once
    _score[(chunks * kv_heads // heads, requests)](
        scratch.weights,
        codes,
        row_table,
        slots,
        lengths,
        sparse_from,
        scratch.logits,
        scratch.tops,
        scratch.sums,
        row_table.stride(0),
        capacity,
        KV_HEADS=kv_heads,
        HEADS=heads,
        GROUP=group,
        PADDED=padded,
        CHUNK=LAUNCH.chunk,
        SIZE=size,
        WIDTH=width,
        BLOCK=LAUNCH.block,
        TILE=TILE,
        COLUMNS=columns_of_head(heads * padded),
        STAGES=LAUNCH.stages,
        INTERPRETED=not queries.is_cuda,
        num_warps=LAUNCH.warps,
        HAS_DEPENDENTS=has_dependents(queries),
    )
    pick_by_logits(
        row_table,
        slots,
        lengths,
        sparse_from,
        budgets,
        group,
        LAUNCH.chunk,
        sinks,
        recent,
        scratch,
        out,
    )


def _heads_at_once(kv_heads: int, size: int, padded: int) -> int:
    """How many KV heads a program scores, whose sketches, of so many bytes, are neighbours."""
    heads = 1
    while (
        kv_heads % (2 * heads) == 0
        and 2 * heads * size <= _BYTES_READ
        and 2 * heads * padded <= _MOST_QUERIES
    ):
        heads *= 2
    return heads


def row_scratch(
    requests: int, query_heads: int, kv_heads: int, capacity: int, codes: Tensor
) -> RowScratch:
    """See the reference."""
    padded = triton.next_power_of_2(query_heads // kv_heads)
    capacity = triton.cdiv(capacity, 512) * 512  # so that all rows are aligned
    units, chunks = requests * kv_heads, triton.cdiv(capacity, LAUNCH.chunk)
    return RowScratch(
        codes.new_empty((requests, query_heads, 4 * codes.shape[2]), dtype=torch.float32),
        codes.new_empty((units, padded, capacity)),
        codes.new_empty((units, padded, capacity // TILE), dtype=torch.int32),
        codes.new_empty((units, chunks, 2, padded), dtype=torch.float32),
        codes.new_empty((units, 8, capacity // 8)),
        codes.new_empty((units, 2, capacity // 32), dtype=torch.int32),
    )


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def _encode(
    keys,
    maps,
    shift,
    rows,
    codes,
    count,
    token_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program encodes a part of the channels of BLOCK keys of a head."""
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = index < count
    row = tl.load(rows + index, mask=is_token, other=0).to(tl.int64)
    source = index.to(tl.int64) * token_stride + head * head_stride
    at = source[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    key = tl.load(keys + at, mask=is_token[:, None], other=0.0).to(tl.float32)
    channel = head * (FINE + COARSE)
    encode_block(
        key,
        maps + channel * HEAD_DIM,
        shift + channel,
        codes + (row * KV_HEADS + head) * SIZE,
        is_token,
        FINE,
        COARSE,
        HEAD_DIM,
        BLOCK,
    )


@triton.jit(do_not_specialize_on_alignment=["row_table", "slots", "lengths", "sparse_from"])
def _score(
    weights,
    codes,
    row_table,
    slots,
    lengths,
    sparse_from,
    logits,
    tops,
    sums,
    table_stride,
    capacity,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HAS_DEPENDENTS: tl.constexpr,
):
    """One program computes the logits of CHUNK tokens of HEADS units."""
    let_dependents_start(HAS_DEPENDENTS)
    chunk = tl.program_id(0) // (KV_HEADS // HEADS)
    head = tl.program_id(0) % (KV_HEADS // HEADS) * HEADS
    request = tl.program_id(1).to(tl.int64)
    unit = request * KV_HEADS + head
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    start, scored = chunk * CHUNK, length - 1
    least = tl.load(sparse_from + slot)
    if start < scored:
        # Weights are loaded while it is looked up whether the request is sparse.
        own_weights, weight_scale = load_weights(
            weights + unit * GROUP * 4 * SIZE, GROUP, PADDED, SIZE, WIDTH, COLUMNS, HEADS
        )
        if length >= least:
            rows = row_table + slot * table_stride
            own_codes = codes + head * SIZE
            words = logits.to(tl.pointer_type(tl.int32)) + unit * (capacity // 4) * PADDED
            unit_tops = tops + unit * (capacity // TILE) * PADDED
            stop = tl.minimum(start + CHUNK, scored)
            byte, query = tl.arange(0, WIDTH), tl.arange(0, HEADS * PADDED)
            greatest = tl.full((BLOCK // TILE, HEADS * PADDED), _NO_LOGIT, tl.float32)
            total = tl.zeros((BLOCK // TILE, TILE, HEADS * PADDED), tl.float32)
            scale = tl.minimum(weight_scale * _STEPS, _MOST_SCALE)
            for block in tl.range(start, stop, BLOCK, num_stages=STAGES):
                token = block + _tokens_of_rows(BLOCK)
                # Behind the last token it is row 0, whose logits count for nothing.
                row = tl.load(rows + token, mask=token < stop, other=0).to(tl.int64)
                at = (row * KV_HEADS * SIZE)[:, None] + byte[None, :]
                if HEADS * SIZE == WIDTH:
                    packed = tl.load(own_codes + at)
                else:
                    packed = tl.load(own_codes + at, mask=(byte < HEADS * SIZE)[None, :], other=0)
                logit = logits_of(
                    packed, own_weights, scale, HEADS * PADDED, BLOCK, COLUMNS, INTERPRETED
                )  # in steps
                # Not the mask of the rows, which threads would have to tell each other.
                is_token = _tokens_of_rows(BLOCK) < stop - block
                logit = _by_token(tl.where(is_token[:, None], logit, _NO_LOGIT), TILE)
                steps = (logit + _INTEGER).to(tl.int32, bitcast=True)
                top = tl.max(steps, axis=1)
                below = tl.maximum(steps - (top - _KEY_MOST)[:, None, :], 0)
                below = tl.reshape(below, (BLOCK // 4, 4, HEADS * PADDED))
                word = tl.sum(below << (8 * tl.arange(0, 4))[None, :, None], axis=1)
                at = block // 4 + tl.arange(0, BLOCK // 4)
                tl.store(words + query[None, :] * (capacity // 4) + at[:, None], word)
                at = block // TILE + tl.arange(0, BLOCK // TILE)
                at = query[None, :] * (capacity // TILE) + at[:, None]
                tl.store(unit_tops + at, top - _INTEGER_BITS)
                before = greatest
                greatest = tl.maximum(greatest, top.to(tl.float32, bitcast=True) - _INTEGER)
                of_greatest = greatest * _LOG2_OF_STEP
                total *= tl.exp2(before * _LOG2_OF_STEP - of_greatest)[:, None, :]
                total += tl.exp2(logit * _LOG2_OF_STEP - of_greatest[:, None, :])
            share = (unit + query // PADDED) * tl.cdiv(capacity, CHUNK) + chunk
            target = sums + share * 2 * PADDED + query % PADDED
            of_chunk = tl.max(greatest, axis=0)
            total = tl.sum(total, axis=1) * tl.exp2((greatest - of_chunk[None, :]) * _LOG2_OF_STEP)
            tl.store(target, of_chunk * _LOG2_OF_STEP)
            tl.store(target + PADDED, tl.sum(total, axis=0))


@triton.jit
def _tokens_of_rows(BLOCK: tl.constexpr):
    """Which token of a block is multiplied as which row, so that a thread has four in a row.

    A warp multiplies pieces of 16 rows, the first half of them before the others; a thread has two
    rows of a piece, which are eight apart.
    """
    row = tl.arange(0, BLOCK)
    warp_and_lane = row // 16 % (BLOCK // 32) * 8 + row % 8
    return warp_and_lane * 4 + row // (BLOCK // 2) * 2 + row // 8 % 2


@triton.jit
def _by_token(logit, TILE: tl.constexpr):
    """Put rows, (BLOCK, queries), in order of their tokens: (BLOCK / TILE, TILE, queries)."""
    BLOCK: tl.constexpr = logit.shape[0]
    QUERIES: tl.constexpr = logit.shape[1]
    parts = tl.reshape(logit, (2, BLOCK // 32, 2, 8, QUERIES))
    return tl.reshape(tl.permute(parts, (1, 3, 0, 2, 4)), (BLOCK // TILE, TILE, QUERIES))
