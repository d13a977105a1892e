"""Scores of tokens by the current query, Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.baselines.kernels.candidates import (
    BLOCK,
    count_splits,
    first_recent,
    must_choose,
)
from scripts.baselines.kernels.queries import load_queries, padded_group
from scripts.baselines.kernels.reference import Budget, ScoreWorkspace

_FINISH_ELEMENTS = 4096
"""A program turns this many logits into scores at a time."""


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
    """See the reference. Two launches: logits, and then scores, which need all logits of a head."""
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
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED=padded,
        HEAD_DIM=head_dim,
        PADDED_DIMS=max(16, triton.next_power_of_2(head_dim)),
        PAGE_TOKENS=budget.page,
        BLOCK=BLOCK,
        # The interpreter multiplies no bfloat16.
        EXACT=keys.dtype == torch.float32 or not keys.is_cuda,
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
        SETS=out.shape[1],
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED=padded,
        HEADS=heads,
        PADDED_HEADS=columns,
        SPLITS=splits,
        SHARED=shared,
        PAGE_TOKENS=budget.page,
        BLOCK=block,
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIMS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program writes the logits of every num_programs(0)-th block of a unit's tokens.

    A unit is a row and kv head. The program also leaves its share of the log-sum-exp of each query
    head: the largest logit, and the sum of exponentials relative to it.
    """
    unit = tl.program_id(1)
    row = unit // KV_HEADS
    head = unit % KV_HEADS
    length = tl.load(lengths + row).to(tl.int32)
    if must_choose(length, sinks, recent, selected, PAGE_TOKENS):
        DTYPE: tl.constexpr = tl.float32 if EXACT else keys.dtype.element_ty
        # The queries of the unit, and where its tokens are.
        query = load_queries(queries, unit, GROUP, PADDED, HEAD_DIM, PADDED_DIMS).to(DTYPE)
        columns = tl.arange(0, PADDED)
        dims = tl.arange(0, PADDED_DIMS)[None, :]
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context
        unit_logits = logits + unit.to(tl.int64) * capacity * GROUP
        # Block after block: logits, and a running log-sum-exp.
        largest = tl.full((PADDED,), -float("inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        for start in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
            token = start + tl.arange(0, BLOCK)
            valid = token < length
            pool_row = tl.load(tokens + token, mask=valid, other=0).to(tl.int64)
            key = tl.load(
                keys + (pool_row * KV_HEADS + head)[:, None] * HEAD_DIM + dims,
                mask=valid[:, None] & (dims < HEAD_DIM),
                other=0.0,
            ).to(DTYPE)  # [BLOCK, PADDED_DIMS]
            logit = tl.dot(key, query, input_precision="ieee") * scale  # [BLOCK, PADDED]
            tl.store(
                unit_logits + token[:, None] * GROUP + columns[None, :],
                logit,
                mask=valid[:, None] & (columns < GROUP)[None, :],
            )
            logit = tl.where(valid[:, None], logit, -float("inf"))
            larger = tl.maximum(largest, tl.max(logit, axis=0))
            total = total * tl.exp(largest - larger) + tl.sum(
                tl.exp(logit - larger[None, :]), axis=0
            )
            largest = larger
        share = partial + (unit * tl.num_programs(0) + tl.program_id(0)) * 2 * PADDED + columns
        tl.store(share, largest)
        tl.store(share + PADDED, total)


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
    SETS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes the scores of every num_programs(0)-th block of a set's candidates.

    A set is what a kv head of a row selects, or all heads of a row where they share one. A score
    takes the logits of all query heads that share the set.
    """
    unit = tl.program_id(1)
    row = unit // SETS
    length = tl.load(lengths + row).to(tl.int32)
    if must_choose(length, sinks, recent, selected, PAGE_TOKENS):
        # The log-sum-exp of each query head, from the shares of all programs of its unit.
        columns = tl.arange(0, PADDED_HEADS)
        used = columns < HEADS
        kv_unit = row * KV_HEADS + unit % SETS + columns // GROUP  # one column a query head
        in_group = columns % GROUP
        shares = (kv_unit * SPLITS)[None, :] + tl.arange(0, SPLITS)[:, None]
        at = partial + shares * 2 * PADDED + in_group[None, :]
        maxima = tl.load(at, mask=used[None, :], other=0.0)  # [SPLITS, PADDED_HEADS]
        totals = tl.load(at + PADDED, mask=used[None, :], other=1.0)
        greatest = tl.max(maxima, axis=0)
        log_sum = greatest + tl.log(tl.sum(totals * tl.exp(maxima - greatest[None, :]), axis=0))
        # Block after block: log-probabilities, and what the heads make of them together.
        last = first_recent(length, sinks, recent, PAGE_TOKENS)
        for start in range(sinks + tl.program_id(0) * BLOCK, last, tl.num_programs(0) * BLOCK):
            token = start + tl.arange(0, BLOCK)
            valid = token < last
            logit = tl.load(
                logits
                + (kv_unit.to(tl.int64) * capacity * GROUP + in_group)[None, :]
                + token[:, None] * GROUP,
                mask=valid[:, None] & used[None, :],
                other=0.0,
            )
            log_probability = logit - log_sum[None, :]  # [BLOCK, PADDED_HEADS]
            if SHARED:
                probability = tl.where(used[None, :], tl.exp(log_probability), 0.0)
                score = tl.sum(probability, axis=1) / HEADS
            else:
                score = tl.max(tl.where(used[None, :], log_probability, -float("inf")), axis=1)
            tl.store(out + unit.to(tl.int64) * capacity + token, score, valid)
