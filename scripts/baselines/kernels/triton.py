"""Synchronous token selection with the current query, Triton.

Every launch has a fixed grid, so that a CUDA graph can hold it. Its programs stride over the tokens
that a row really has, so that the work follows the lengths on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scripts.baselines.kernels.candidates import first_recent
from scripts.baselines.kernels.pages import build_bounds, score_pages
from scripts.baselines.kernels.reference import Budget
from scripts.baselines.kernels.tokens import score_tokens, score_workspace

__all__ = ["build_bounds", "score_pages", "score_tokens", "score_workspace", "select"]


def select(
    scores: Tensor,
    req_to_token: Tensor,
    slots: Tensor,
    lengths: Tensor,
    budget: Budget,
    out: Tensor,
) -> None:
    """See the reference. One launch: a radix selection, one program a row and head."""
    rows, heads, capacity = scores.shape
    assert scores.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == (rows, heads, budget.width)
    assert budget.selected > 0
    _select[(heads, rows)](
        scores,
        req_to_token,
        slots,
        lengths,
        out,
        req_to_token.stride(0),
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
