"""Attention to the newest tokens, Triton: one launch, which also merges it with that to older ones.

The tokens are few, so a program takes all of them, for _QUERIES queries of a row and KV head. In
plain torch the host would take longer to launch all of it than a GPU for ten thousand older tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_QUERIES = 16
"""The matrix unit takes so many queries at a time."""

_BLOCK = 32
"""Tokens at a time."""

_LOG2_E = tl.constexpr(1.4426950408889634)


def attend_to_ring(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    group_tokens: int,
    scale: float,
    older: tuple[Tensor, Tensor],
    out: Tensor,
    log_sums: Tensor,
) -> None:
    """See the reference. D is a power of two."""
    assert log_sums.is_contiguous()
    by_row = {"rows": None, "sequences": slots, "positions": positions}
    _launch(queries, keys, values, by_row, scale, older, out, log_sums, group_tokens)


def attend_to_each_other(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    scale: float,
    older: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> None:
    """See the reference. D is a power of two."""
    by_row = {"rows": rows, "sequences": rows, "positions": None}
    _launch(queries, keys, values, by_row, scale, older, out, None, 0)


def _launch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    by_row: dict[str, Tensor | None],
    scale: float,
    older: tuple[Tensor, Tensor] | None,
    out: Tensor,
    log_sums: Tensor | None,
    group_tokens: int,
) -> None:
    """Launch `_attend` for every row of `sequences`."""
    _, width, query_heads, head_dim = queries.shape
    kv_heads, sequences = keys.shape[2], by_row["sequences"]
    assert sequences is not None
    assert queries.stride(3) == keys.stride(3) == values.stride(3) == 1
    assert out.is_contiguous()
    older_out, older_sums = older or (None, None)
    assert older_out is None or older_out.is_contiguous()
    assert older_sums is None or older_sums.is_contiguous()
    group = query_heads // kv_heads
    _attend[(len(sequences) * kv_heads, triton.cdiv(width * group, _QUERIES))](
        queries,
        keys,
        values,
        **by_row,
        older=older_out,
        older_sums=older_sums,
        out=out,
        log_sums=log_sums,
        scale=scale,
        width=width,
        query_strides=queries.stride()[:3],
        key_strides=keys.stride()[:3],
        value_strides=values.stride()[:3],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        RING=keys.shape[1] if group_tokens else 0,
        GROUP_TOKENS=group_tokens,
        QUERIES=_QUERIES,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["scale", "width"],
    do_not_specialize_on_alignment=["rows", "sequences", "positions"],
)
def _attend(
    queries,
    keys,
    values,
    rows,
    sequences,
    positions,
    older,
    older_sums,
    out,
    log_sums,
    scale,
    width,
    query_strides,
    key_strides,
    value_strides,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RING: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program attends with QUERIES queries of a KV head: to a ring, or causally without one."""
    row, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    of_batch = row if rows is None else tl.load(rows + row)
    sequence = tl.load(sequences + row).to(tl.int64)
    first, stop = 0, width
    if RING > 0:
        stop = tl.where(sequence < 0, 0, tl.load(positions + row) + 1)
        first = tl.maximum(0, stop // GROUP_TOKENS * GROUP_TOKENS - (RING - GROUP_TOKENS))

    number = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    is_query = number < width * GROUP
    token_of_query, query_head = number // GROUP, head * GROUP + number % GROUP
    dims = tl.arange(0, HEAD_DIM)
    source = of_batch.to(tl.int64) * query_strides[0] + token_of_query * query_strides[1]
    source = (source + query_head * query_strides[2])[:, None] + dims[None, :]
    query = tl.load(queries + source, mask=is_query[:, None], other=0.0).to(tl.float32)
    query *= scale * _LOG2_E  # powers of two are faster than those of e

    largest = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
    own_keys = keys + sequence * key_strides[0] + head * key_strides[2]
    own_values = values + sequence * value_strides[0] + head * value_strides[2]
    for start in range(first, stop, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_token = (token < stop)[:, None]
        entry = (token % RING if RING > 0 else token)[:, None]
        key = tl.load(own_keys + entry * key_strides[1] + dims[None, :], is_token, 0.0)
        value = tl.load(own_values + entry * value_strides[1] + dims[None, :], is_token, 0.0)
        # In three products of TensorFloat-32, which is nearly as exact as float32.
        logits = tl.dot(query, tl.trans(key.to(tl.float32)), input_precision="tf32x3")
        is_seen = (token < stop)[None, :]
        if RING == 0:
            is_seen &= token[None, :] <= token_of_query[:, None]
        logits = tl.where(is_seen, logits, -1e30)
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.where(is_seen, tl.exp2(logits - largest[:, None]), 0.0)
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=1)
        sums = sums * decay[:, None]
        sums = tl.dot(weights, value.to(tl.float32), sums, input_precision="tf32x3")

    if older is not None:
        of_row = (row.to(tl.int64) * width + token_of_query) * KV_HEADS * GROUP + query_head
        log_sum = tl.load(older_sums + of_row, mask=is_query, other=-float("inf")) * _LOG2_E
        at = of_row[:, None] * HEAD_DIM + dims[None, :]
        output = tl.load(older + at, mask=is_query[:, None], other=0.0).to(tl.float32)
        before, largest = largest, tl.maximum(largest, log_sum)
        decay, share = tl.exp2(before - largest), tl.exp2(log_sum - largest)
        total = total * decay + share
        sums = sums * decay[:, None] + output * share[:, None]
    at = (of_batch.to(tl.int64) * width + token_of_query) * KV_HEADS * GROUP + query_head
    some = tl.maximum(total, 1e-30)
    target = out + at[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, sums / some[:, None], mask=is_query[:, None])
    if log_sums is not None:
        log_sum = (largest + tl.log2(some)) * 0.6931471805599453
        tl.store(log_sums + at, tl.where(total > 0, log_sum, -float("inf")), mask=is_query)
