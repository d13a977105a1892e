"""Synchronous token selection with the current query, Triton.

Every launch has a fixed grid, so that it can be captured in a CUDA graph, and its programs stride
over the tokens that a row really has: the work follows the lengths on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cache_rank_kernels.baselines.reference import Budget, ScoreWorkspace
from torch import Tensor

_BLOCK = 64
_FINISH_ELEMENTS = 4096
_TARGET_PROGRAMS = 528  # four a multiprocessor of an H200
_MAX_SPLITS = 64


def _splits(units: int, blocks: int) -> int:
    """Programs that share one unit's tokens: a power of two that fills the GPU."""
    wanted = triton.next_power_of_2(triton.cdiv(_TARGET_PROGRAMS, units))
    return int(max(1, min(wanted, _MAX_SPLITS, triton.next_power_of_2(blocks))))


def _padded(group: int) -> int:
    """Columns of the matrix unit that the heads of a group take."""
    return int(max(16, triton.next_power_of_2(group)))


def score_workspace(
    rows: int, kv_heads: int, group: int, capacity: int, device: torch.device
) -> ScoreWorkspace:
    """Scratch for rows of up to `capacity` tokens: 4 bytes a token, row and query head."""
    units = rows * kv_heads
    splits = _splits(units, triton.cdiv(capacity, _BLOCK))
    return ScoreWorkspace(
        logits=torch.empty((units, capacity, group), dtype=torch.float32, device=device),
        partial=torch.empty((units, splits, 2, _padded(group)), dtype=torch.float32, device=device),
    )


def build_bounds(
    keys: Tensor,
    req_to_token: Tensor,
    slots: Tensor,
    starts: Tensor,
    stops: Tensor,
    max_pages: int,
    page: int,
    pool_page: int,
    bounds: Tensor,
) -> None:
    """See the reference. One launch."""
    _, kv_heads, head_dim = keys.shape
    assert keys.is_contiguous()
    assert bounds.is_contiguous()
    _build_bounds[(max_pages, slots.shape[0])](
        keys,
        req_to_token,
        slots,
        starts,
        stops,
        bounds,
        req_to_token.stride(0),
        kv_heads=kv_heads,
        head_dim=head_dim,
        padded_dims=triton.next_power_of_2(head_dim),
        page_tokens=page,
        pool_page=pool_page,
        num_warps=1,
    )


def score_pages(
    queries: Tensor,
    bounds: Tensor,
    req_to_token: Tensor,
    slots: Tensor,
    lengths: Tensor,
    budget: Budget,
    pool_page: int,
    out: Tensor,
) -> None:
    """See the reference. One launch.

    max(q * min, q * max) is max(q, 0) * max + min(q, 0) * min, so the bound is two products.
    """
    rows, query_heads, head_dim = queries.shape
    kv_heads, pages = bounds.shape[1], out.shape[-1]
    assert queries.is_contiguous()
    assert bounds.is_contiguous()
    assert out.is_contiguous()
    splits = _splits(rows * kv_heads, triton.cdiv(pages, _BLOCK))
    _score_pages[(splits, rows * kv_heads)](
        queries,
        bounds,
        req_to_token,
        slots,
        lengths,
        out,
        req_to_token.stride(0),
        pages,
        budget.sinks,
        budget.recent,
        budget.selected,
        kv_heads=kv_heads,
        group=query_heads // kv_heads,
        padded=_padded(query_heads // kv_heads),
        head_dim=head_dim,
        padded_dims=max(16, triton.next_power_of_2(head_dim)),
        page_tokens=budget.page,
        pool_page=pool_page,
        block=_BLOCK,
        exact=bounds.dtype == torch.float32 or not bounds.is_cuda,
        num_warps=4,
    )


def score_tokens(
    queries: Tensor,
    keys: Tensor,
    req_to_token: Tensor,
    slots: Tensor,
    lengths: Tensor,
    budget: Budget,
    scale: float,
    shared: bool,
    workspace: ScoreWorkspace,
    out: Tensor,
) -> None:
    """See the reference. Two launches: logits, then scores, which need all logits of a head."""
    rows, query_heads, head_dim = queries.shape
    kv_heads, capacity = keys.shape[1], out.shape[-1]
    group = query_heads // kv_heads
    splits, padded = workspace.partial.shape[1], _padded(group)
    heads = query_heads if shared else group
    assert queries.is_contiguous()
    assert keys.is_contiguous()
    assert out.is_contiguous()
    assert workspace.logits.shape == (rows * kv_heads, capacity, group)
    assert out.shape[1] == (1 if shared else kv_heads)
    _logits[(splits, rows * kv_heads)](
        queries,
        keys,
        req_to_token,
        slots,
        lengths,
        *workspace,
        req_to_token.stride(0),
        capacity,
        scale,
        budget.sinks,
        budget.recent,
        budget.selected,
        kv_heads=kv_heads,
        group=group,
        padded=padded,
        head_dim=head_dim,
        padded_dims=max(16, triton.next_power_of_2(head_dim)),
        page_tokens=budget.page,
        block=_BLOCK,
        # The interpreter multiplies no bfloat16.
        exact=keys.dtype == torch.float32 or not keys.is_cuda,
        num_warps=4,
    )
    columns = triton.next_power_of_2(heads)
    block = max(16, _FINISH_ELEMENTS // columns)
    _scores[(_splits(rows * out.shape[1], triton.cdiv(capacity, block)), rows * out.shape[1])](
        lengths,
        *workspace,
        out,
        capacity,
        budget.sinks,
        budget.recent,
        budget.selected,
        sets=out.shape[1],
        kv_heads=kv_heads,
        group=group,
        padded=padded,
        heads=heads,
        padded_heads=columns,
        splits=splits,
        shared=shared,
        page_tokens=budget.page,
        block=block,
        num_warps=4,
    )


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
        heads=heads,
        page_tokens=budget.page,
        block=2048 if budget.page == 1 else 512,
        num_warps=8,
    )


@triton.jit
def _first_recent(length, sinks, recent, page_tokens: tl.constexpr):
    """As Budget.recent_start_of."""
    wanted = tl.maximum(length - 1 - recent, 0) // page_tokens * page_tokens
    return tl.maximum(wanted, tl.minimum(sinks, length))


@triton.jit
def _must_choose(length, sinks, recent, selected, page_tokens: tl.constexpr):
    """Whether there are more candidates than are taken."""
    start = _first_recent(length, sinks, recent, page_tokens)
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
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dims: tl.constexpr,
    page_tokens: tl.constexpr,
    pool_page: tl.constexpr,
):
    row = tl.program_id(1)
    page = tl.load(starts + row).to(tl.int32) // page_tokens + tl.program_id(0)
    if (page + 1) * page_tokens <= tl.load(stops + row):
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context + page * page_tokens
        rows = tl.load(tokens + tl.arange(0, page_tokens)).to(tl.int64)
        entry = tl.load(tokens).to(tl.int64) // pool_page
        dims = tl.arange(0, padded_dims)
        inside = dims < head_dim
        for head in range(kv_heads):
            key = tl.load(
                keys + (rows * kv_heads + head)[:, None] * head_dim + dims[None, :],
                mask=inside[None, :],
                other=0.0,
            ).to(tl.float32)
            to = bounds + (entry * kv_heads + head) * 2 * head_dim + dims
            tl.store(to, tl.max(key, axis=0).to(bounds.dtype.element_ty), inside)
            tl.store(to + head_dim, tl.min(key, axis=0).to(bounds.dtype.element_ty), inside)


@triton.jit
def _load_queries(
    queries,
    unit,
    group: tl.constexpr,
    padded: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dims: tl.constexpr,
):
    """(padded_dims, padded): the queries of one kv head's group as columns."""
    column = tl.arange(0, padded)[None, :]
    dims = tl.arange(0, padded_dims)[:, None]
    return tl.load(
        queries + unit.to(tl.int64) * group * head_dim + column * head_dim + dims,
        mask=(column < group) & (dims < head_dim),
        other=0.0,
    )


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
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dims: tl.constexpr,
    page_tokens: tl.constexpr,
    pool_page: tl.constexpr,
    block: tl.constexpr,
    exact: tl.constexpr,
):
    unit = tl.program_id(1)
    row = unit // kv_heads
    head = unit % kv_heads
    length = tl.load(lengths + row).to(tl.int32)
    if _must_choose(length, sinks, recent, selected, page_tokens):
        dtype: tl.constexpr = tl.float32 if exact else bounds.dtype.element_ty
        query = _load_queries(queries, unit, group, padded, head_dim, padded_dims).to(tl.float32)
        positive = tl.maximum(query, 0.0).to(dtype)
        negative = tl.minimum(query, 0.0).to(dtype)
        is_head = (tl.arange(0, padded) < group)[None, :]
        dims = tl.arange(0, padded_dims)[None, :]
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context
        last = _first_recent(length, sinks, recent, page_tokens) // page_tokens
        step = tl.num_programs(0) * block
        for start in range(sinks // page_tokens + tl.program_id(0) * block, last, step):
            page = start + tl.arange(0, block)
            valid = page < last
            entry = (
                tl.load(tokens + page * page_tokens, mask=valid, other=0).to(tl.int64) // pool_page
            )
            at = bounds + (entry * kv_heads + head)[:, None] * 2 * head_dim + dims
            mask = valid[:, None] & (dims < head_dim)
            largest = tl.load(at, mask=mask, other=0.0).to(dtype)
            smallest = tl.load(at + head_dim, mask=mask, other=0.0).to(dtype)
            bound = tl.dot(largest, positive, input_precision="ieee")
            bound = tl.dot(smallest, negative, acc=bound, input_precision="ieee")
            bound = tl.where(is_head, bound, -float("inf"))
            tl.store(out + unit.to(tl.int64) * pages + page, tl.max(bound, axis=1), valid)


@triton.jit(do_not_specialize=["context", "capacity", "sinks", "recent", "selected"])
def _logits(
    queries,
    keys,
    req_to_token,
    slots,
    lengths,
    logits,
    partial,
    context,
    capacity,
    scale,
    sinks,
    recent,
    selected,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dims: tl.constexpr,
    page_tokens: tl.constexpr,
    block: tl.constexpr,
    exact: tl.constexpr,
):
    """Logits of all tokens, and each program's share of every head's log-sum-exp."""
    unit = tl.program_id(1)
    row = unit // kv_heads
    head = unit % kv_heads
    length = tl.load(lengths + row).to(tl.int32)
    if _must_choose(length, sinks, recent, selected, page_tokens):
        dtype: tl.constexpr = tl.float32 if exact else keys.dtype.element_ty
        query = _load_queries(queries, unit, group, padded, head_dim, padded_dims).to(dtype)
        columns = tl.arange(0, padded)
        dims = tl.arange(0, padded_dims)[None, :]
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context
        unit_logits = logits + unit.to(tl.int64) * capacity * group
        largest = tl.full((padded,), -float("inf"), tl.float32)
        total = tl.zeros((padded,), tl.float32)
        for start in range(tl.program_id(0) * block, length, tl.num_programs(0) * block):
            token = start + tl.arange(0, block)
            valid = token < length
            pool_row = tl.load(tokens + token, mask=valid, other=0).to(tl.int64)
            key = tl.load(
                keys + (pool_row * kv_heads + head)[:, None] * head_dim + dims,
                mask=valid[:, None] & (dims < head_dim),
                other=0.0,
            ).to(dtype)
            logit = tl.dot(key, query, input_precision="ieee") * scale
            tl.store(
                unit_logits + token[:, None] * group + columns[None, :],
                logit,
                mask=valid[:, None] & (columns < group)[None, :],
            )
            logit = tl.where(valid[:, None], logit, -float("inf"))
            larger = tl.maximum(largest, tl.max(logit, axis=0))
            total = total * tl.exp(largest - larger) + tl.sum(
                tl.exp(logit - larger[None, :]), axis=0
            )
            largest = larger
        share = partial + (unit * tl.num_programs(0) + tl.program_id(0)) * 2 * padded + columns
        tl.store(share, largest)
        tl.store(share + padded, total)


@triton.jit(do_not_specialize=["capacity", "sinks", "recent", "selected"])
def _scores(
    lengths,
    logits,
    partial,
    out,
    capacity,
    sinks,
    recent,
    selected,
    sets: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    heads: tl.constexpr,
    padded_heads: tl.constexpr,
    splits: tl.constexpr,
    shared: tl.constexpr,
    page_tokens: tl.constexpr,
    block: tl.constexpr,
):
    """Scores of the candidates of one set, from the logits of the heads that share it."""
    unit = tl.program_id(1)
    row = unit // sets
    length = tl.load(lengths + row).to(tl.int32)
    if _must_choose(length, sinks, recent, selected, page_tokens):
        columns = tl.arange(0, padded_heads)
        used = columns < heads
        kv_unit = row * kv_heads + unit % sets + columns // group  # one column a query head
        in_group = columns % group
        shares = (kv_unit * splits)[None, :] + tl.arange(0, splits)[:, None]
        at = partial + shares * 2 * padded + in_group[None, :]
        maxima = tl.load(at, mask=used[None, :], other=0.0)
        totals = tl.load(at + padded, mask=used[None, :], other=1.0)
        greatest = tl.max(maxima, axis=0)
        log_sum = greatest + tl.log(tl.sum(totals * tl.exp(maxima - greatest[None, :]), axis=0))
        last = _first_recent(length, sinks, recent, page_tokens)
        for start in range(sinks + tl.program_id(0) * block, last, tl.num_programs(0) * block):
            token = start + tl.arange(0, block)
            valid = token < last
            logit = tl.load(
                logits
                + (kv_unit.to(tl.int64) * capacity * group + in_group)[None, :]
                + token[:, None] * group,
                mask=valid[:, None] & used[None, :],
                other=0.0,
            )
            log_probability = logit - log_sum[None, :]
            if shared:
                probability = tl.where(used[None, :], tl.exp(log_probability), 0.0)
                score = tl.sum(probability, axis=1) / heads
            else:
                score = tl.max(tl.where(used[None, :], log_probability, -float("inf")), axis=1)
            tl.store(out + unit.to(tl.int64) * capacity + token, score, valid)


@triton.jit
def _sort_key(score):
    """Unsigned integers in the order of the scores: NaN is lowest, both zeros are one."""
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
    heads: tl.constexpr,
    page_tokens: tl.constexpr,
    block: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    unit = row * heads + head
    length = tl.load(lengths + row).to(tl.int32)
    tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context
    unit_out = out + unit.to(tl.int64) * width
    offsets = tl.arange(0, block)

    own_sinks = tl.minimum(sinks, length)
    start_recent = _first_recent(length, sinks, recent, page_tokens)
    fixed = own_sinks + length - start_recent
    for start in range(0, fixed, block):
        index = start + offsets
        token = tl.where(index < own_sinks, index, index - own_sinks + start_recent)
        pool_row = tl.load(tokens + token, mask=index < fixed, other=0)
        tl.store(unit_out + index, pool_row * heads + head, mask=index < fixed)

    first = own_sinks // page_tokens
    candidates = (start_recent - own_sinks) // page_tokens
    remaining = tl.minimum(selected // page_tokens, candidates)
    unit_scores = scores + unit.to(tl.int64) * capacity + first
    # The key of the last page that is taken, a byte at a time. Where all are, any key will do.
    threshold = tl.full((), 0, tl.uint32)
    if remaining < candidates:
        digits = tl.arange(0, 256)
        for byte in tl.static_range(4):
            histogram = tl.zeros((256,), tl.int32)
            for start in range(0, candidates, block):
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

    taken = 0
    equals = 0
    for start in range(0, candidates, block):
        index = candidates - 1 - start - offsets  # ties go to the newest
        valid = index >= 0
        key = _sort_key(tl.load(unit_scores + index, mask=valid, other=0.0))
        equal = (valid & (key == threshold)).to(tl.int32)
        among_equals = equals + tl.cumsum(equal, 0)
        take = valid & ((key > threshold) | ((equal == 1) & (among_equals <= remaining)))
        place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        in_page = tl.arange(0, page_tokens)[None, :]
        token = (first + index)[:, None] * page_tokens + in_page
        pool_row = tl.load(tokens + token, mask=take[:, None], other=0)
        to = unit_out + fixed + place[:, None] * page_tokens + in_page
        tl.store(to, pool_row * heads + head, mask=take[:, None])
        taken += tl.sum(take.to(tl.int32))
        equals += tl.sum(equal)
