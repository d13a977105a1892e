"""Selection with the current query, Triton: what Quest runs in a decode step.

Every launch has a fixed grid, so that a CUDA graph can hold it. Its programs stride over the tokens
that a row really has, so that the work follows the lengths on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.baselines.reference import Batch, Budget

BLOCK = 64
"""A program scores this many pages at a time."""

_TARGET_PROGRAMS = 528
"""Four programs for each multiprocessor of an H200."""

_MAX_SPLITS = 64
"""At most this many programs share a unit."""


def count_splits(units: int, blocks: int) -> int:
    """How many programs share one unit's blocks: a power of two that fills the GPU."""
    wanted = triton.next_power_of_2(triton.cdiv(_TARGET_PROGRAMS, units))
    return int(max(1, min(wanted, _MAX_SPLITS, triton.next_power_of_2(blocks))))


def build_bounds(
    keys: Tensor, batch: Batch, starts: Tensor, max_pages: int, page: int, bounds: Tensor
) -> None:
    """See the reference. One launch."""
    _, kv_heads, head_dim = keys.shape
    assert keys.is_contiguous()
    assert bounds.is_contiguous()
    _build_bounds[(max_pages, batch.slots.shape[0])](
        keys,
        batch.table,
        batch.slots,
        starts,
        batch.lengths,
        bounds,
        batch.table.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIMS=triton.next_power_of_2(head_dim),
        PAGE_TOKENS=page,
        POOL_PAGE=batch.pool_page,
        num_warps=1,
    )


def score_pages(queries: Tensor, bounds: Tensor, batch: Batch, budget: Budget, out: Tensor) -> None:
    """See the reference. One launch.

    max(q · min, q · max) is max(q, 0) · max + min(q, 0) · min, so the bound is two products.
    """
    rows, query_heads, head_dim = queries.shape
    kv_heads, pages = bounds.shape[1], out.shape[-1]
    assert queries.is_contiguous()
    assert bounds.is_contiguous()
    assert out.is_contiguous()
    splits = count_splits(rows * kv_heads, triton.cdiv(pages, BLOCK))
    group = query_heads // kv_heads
    _score_pages[(splits, rows * kv_heads)](
        queries,
        bounds,
        batch.table,
        batch.slots,
        batch.lengths,
        out,
        batch.table.stride(0),
        pages,
        budget.sinks,
        budget.recent,
        budget.selected,
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PADDED_DIMS=max(16, triton.next_power_of_2(head_dim)),
        PAGE_TOKENS=budget.page,
        POOL_PAGE=batch.pool_page,
        BLOCK=BLOCK,
        EXACT=bounds.dtype == torch.float32 or not bounds.is_cuda,
        num_warps=4,
    )


def select(scores: Tensor, batch: Batch, budget: Budget, out: Tensor) -> None:
    """See the reference. One launch: a radix selection, one program a row and head."""
    rows, heads, capacity = scores.shape
    assert scores.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == (rows, heads, budget.width)
    assert budget.selected > 0
    _select[(heads, rows)](
        scores,
        batch.table,
        batch.slots,
        batch.lengths,
        out,
        batch.table.stride(0),
        capacity,
        budget.width,
        budget.sinks,
        budget.recent,
        budget.selected,
        HEADS=heads,
        PAGE_TOKENS=budget.page,
        BLOCK=2048 if budget.page == 1 else 512,
        num_warps=8,
    )


@triton.jit
def first_recent(length, sinks, recent, PAGE_TOKENS: tl.constexpr):
    """The first token after the candidates; see `Budget.recent_start_of`."""
    wanted = tl.maximum(length - 1 - recent, 0) // PAGE_TOKENS * PAGE_TOKENS
    return tl.maximum(wanted, tl.minimum(sinks, length))


@triton.jit
def must_choose(length, sinks, recent, selected, PAGE_TOKENS: tl.constexpr):
    """Whether there are more candidates than are selected."""
    start = first_recent(length, sinks, recent, PAGE_TOKENS)
    return start - tl.minimum(sinks, length) > selected


@triton.jit(do_not_specialize=["context"])
def _build_bounds(
    keys,
    req_to_token,
    slots,
    starts,
    stops,
    bounds,
    context,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIMS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    POOL_PAGE: tl.constexpr,
):
    """One program takes the bounds of one page of one row, for all kv heads."""
    row = tl.program_id(1)
    page = tl.load(starts + row).to(tl.int32) // PAGE_TOKENS + tl.program_id(0)
    if (page + 1) * PAGE_TOKENS <= tl.load(stops + row):
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context + page * PAGE_TOKENS
        rows = tl.load(tokens + tl.arange(0, PAGE_TOKENS)).to(tl.int64)
        entry = tl.load(tokens).to(tl.int64) // POOL_PAGE
        dims = tl.arange(0, PADDED_DIMS)
        inside = dims < HEAD_DIM
        for head in range(KV_HEADS):
            key = tl.load(
                keys + (rows * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :],
                mask=inside[None, :],
                other=0.0,
            ).to(tl.float32)  # [PAGE_TOKENS, PADDED_DIMS]
            to = bounds + (entry * KV_HEADS + head) * 2 * HEAD_DIM + dims
            tl.store(to, tl.max(key, axis=0).to(bounds.dtype.element_ty), inside)
            tl.store(to + HEAD_DIM, tl.min(key, axis=0).to(bounds.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["context", "pages", "sinks", "recent", "selected"])
def _score_pages(
    queries,
    bounds,
    req_to_token,
    slots,
    lengths,
    out,
    context,
    pages,
    sinks,
    recent,
    selected,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIMS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    POOL_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program scores every num_programs(0)-th block of a unit's candidate pages.

    A unit is a row and kv head. A row whose candidates are all taken is left alone.
    """
    unit = tl.program_id(1)
    row = unit // KV_HEADS
    head = unit % KV_HEADS
    length = tl.load(lengths + row).to(tl.int32)
    if must_choose(length, sinks, recent, selected, PAGE_TOKENS):
        # The queries, split by sign: what multiplies largest and what multiplies smallest keys.
        DTYPE: tl.constexpr = tl.float32 if EXACT else bounds.dtype.element_ty
        column = tl.arange(0, PADDED)[None, :]
        rows = tl.arange(0, PADDED_DIMS)[:, None]
        query = tl.load(
            queries + unit.to(tl.int64) * GROUP * HEAD_DIM + column * HEAD_DIM + rows,
            mask=(column < GROUP) & (rows < HEAD_DIM),
            other=0.0,
        ).to(tl.float32)
        positive = tl.maximum(query, 0.0).to(DTYPE)  # [PADDED_DIMS, PADDED]
        negative = tl.minimum(query, 0.0).to(DTYPE)
        is_head = column < GROUP
        dims = tl.arange(0, PADDED_DIMS)[None, :]
        # Block after block: the bounds of its pages, and their products with the queries.
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context
        last = first_recent(length, sinks, recent, PAGE_TOKENS) // PAGE_TOKENS
        step = tl.num_programs(0) * BLOCK
        for start in range(sinks // PAGE_TOKENS + tl.program_id(0) * BLOCK, last, step):
            page = start + tl.arange(0, BLOCK)
            valid = page < last
            entry = (
                tl.load(tokens + page * PAGE_TOKENS, mask=valid, other=0).to(tl.int64) // POOL_PAGE
            )
            at = bounds + (entry * KV_HEADS + head)[:, None] * 2 * HEAD_DIM + dims
            mask = valid[:, None] & (dims < HEAD_DIM)
            largest = tl.load(at, mask=mask, other=0.0).to(DTYPE)  # [BLOCK, PADDED_DIMS]
            smallest = tl.load(at + HEAD_DIM, mask=mask, other=0.0).to(DTYPE)
            bound = tl.dot(largest, positive, input_precision="ieee")  # [BLOCK, PADDED]
            bound = tl.dot(smallest, negative, acc=bound, input_precision="ieee")
            bound = tl.where(is_head, bound, -float("inf"))
            tl.store(out + unit.to(tl.int64) * pages + page, tl.max(bound, axis=1), valid)


@triton.jit
def _sort_key(score):
    """Map scores to unsigned integers of the same order: NaN is lowest, both zeros are one."""
    score = tl.where(score == score, score, -float("inf"))
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit(do_not_specialize=["context", "capacity", "width", "sinks", "recent", "selected"])
def _select(
    scores,
    req_to_token,
    slots,
    lengths,
    out,
    context,
    capacity,
    width,
    sinks,
    recent,
    selected,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program lists what one row attends to in one head: a radix selection of pages."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    unit = row * HEADS + head
    length = tl.load(lengths + row).to(tl.int32)
    tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context
    unit_out = out + unit.to(tl.int64) * width
    offsets = tl.arange(0, BLOCK)

    # What is always attended to: the sinks, and the newest tokens.
    own_sinks = tl.minimum(sinks, length)
    start_recent = first_recent(length, sinks, recent, PAGE_TOKENS)
    fixed = own_sinks + length - start_recent
    for start in range(0, fixed, BLOCK):
        index = start + offsets
        token = tl.where(index < own_sinks, index, index - own_sinks + start_recent)
        pool_row = tl.load(tokens + token, mask=index < fixed, other=0)
        tl.store(unit_out + index, pool_row * HEADS + head, mask=index < fixed)

    # The key of the last page that is taken, a byte at a time. Where all are, any key will do.
    first = own_sinks // PAGE_TOKENS
    candidates = (start_recent - own_sinks) // PAGE_TOKENS
    remaining = tl.minimum(selected // PAGE_TOKENS, candidates)
    unit_scores = scores + unit.to(tl.int64) * capacity + first
    threshold = tl.full((), 0, tl.uint32)
    if remaining < candidates:
        digits = tl.arange(0, 256)
        for byte in tl.static_range(4):
            histogram = tl.zeros((256,), tl.int32)  # [256]
            for start in range(0, candidates, BLOCK):
                index = start + offsets
                counted = index < candidates
                key = _sort_key(tl.load(unit_scores + index, mask=counted, other=0.0))
                if byte > 0:
                    counted &= (key >> (32 - 8 * byte)) == (threshold >> (32 - 8 * byte))
                digit = ((key >> (24 - 8 * byte)) & 255).to(tl.int32)
                histogram += tl.histogram(digit, 256, mask=counted)
            above = tl.sum(histogram) - tl.cumsum(histogram, 0)
            here = (above < remaining) & (above + histogram >= remaining)
            remaining -= tl.sum(tl.where(here, above, 0))
            found = tl.sum(tl.where(here, digits, 0)).to(tl.uint32)
            threshold = threshold | (found << (24 - 8 * byte))

    # The pages above the threshold, and as many of those at it as are still wanted.
    taken = 0
    equals = 0
    for start in range(0, candidates, BLOCK):
        index = candidates - 1 - start - offsets  # ties go to the newest
        valid = index >= 0
        key = _sort_key(tl.load(unit_scores + index, mask=valid, other=0.0))
        equal = (valid & (key == threshold)).to(tl.int32)
        among_equals = equals + tl.cumsum(equal, 0)
        take = valid & ((key > threshold) | ((equal == 1) & (among_equals <= remaining)))
        place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        in_page = tl.arange(0, PAGE_TOKENS)[None, :]  # [1, PAGE_TOKENS]
        token = (first + index)[:, None] * PAGE_TOKENS + in_page
        pool_row = tl.load(tokens + token, mask=take[:, None], other=0)
        to = unit_out + fixed + place[:, None] * PAGE_TOKENS + in_page
        tl.store(to, pool_row * HEADS + head, mask=take[:, None])
        taken += tl.sum(take.to(tl.int32))
        equals += tl.sum(equal)
