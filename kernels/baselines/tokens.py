"""Scores of tokens by the current query, Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cache_rank_kernels.baselines.parts import (
    BLOCK,
    count_splits,
    first_recent,
    load_queries,
    must_choose,
    padded_group,
)
from cache_rank_kernels.baselines.reference import Budget, ScoreWorkspace
from torch import Tensor

_FINISH_ELEMENTS = 4096


def score_workspace(
    rows: int, kv_heads: int, group: int, capacity: int, device: torch.device
) -> ScoreWorkspace:
    """Scratch for rows of up to `capacity` tokens: 4 bytes a token, row and query head."""
    units = rows * kv_heads
    splits = count_splits(units, triton.cdiv(capacity, BLOCK))
    return ScoreWorkspace(
        logits=torch.empty((units, capacity, group), dtype=torch.float32, device=device),
        partial=torch.empty(
            (units, splits, 2, padded_group(group)), dtype=torch.float32, device=device
        ),
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
    splits, padded = workspace.partial.shape[1], padded_group(group)
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
        block=BLOCK,
        # The interpreter multiplies no bfloat16.
        exact=keys.dtype == torch.float32 or not keys.is_cuda,
        num_warps=4,
    )
    columns = triton.next_power_of_2(heads)
    block = max(16, _FINISH_ELEMENTS // columns)
    _scores[(count_splits(rows * out.shape[1], triton.cdiv(capacity, block)), rows * out.shape[1])](
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
    if must_choose(length, sinks, recent, selected, page_tokens):
        dtype: tl.constexpr = tl.float32 if exact else keys.dtype.element_ty
        query = load_queries(queries, unit, group, padded, head_dim, padded_dims).to(dtype)
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
    if must_choose(length, sinks, recent, selected, page_tokens):
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
        last = first_recent(length, sinks, recent, page_tokens)
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
