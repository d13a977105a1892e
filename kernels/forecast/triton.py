"""Queries of layers to come are forecast from the hidden state, Triton.

One launch: weights are read once, and what becomes of a head's products never leaves its program.
A row's sums are in the same order whatever other rows there are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ROWS = 16
_BLOCK_WIDTH = 64
"""A step of a program multiplies so many rows by so many elements of their states."""

_TURN = tl.constexpr(2 * math.pi)


def forecast_step(
    hidden: Tensor,
    projections: Tensor,
    constants: Tensor,
    query_norms: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    frequency: Tensor | None,
    interleaved: bool,
    rotary_scale: float,
    norm_epsilon: float,
    query_norm_epsilon: float,
    out: Tensor,
) -> None:
    """See the reference. D is even."""
    rows, layers, query_heads, head_dim = out.shape
    width = hidden.shape[1]
    assert projections.shape == (layers, query_heads, width, head_dim)
    assert hidden.stride(1) == 1
    assert projections.is_contiguous()
    assert constants.is_contiguous()
    assert query_norms is None or query_norms.is_contiguous()
    assert out.is_contiguous()
    assert out.dtype == torch.float32
    heads = layers * query_heads
    _forecast[(heads, triton.cdiv(rows, _BLOCK_ROWS))](
        hidden,
        projections,
        constants,
        query_norms,
        positions,
        slots,
        frequency,
        out,
        rows,
        hidden.stride(0),
        rotary_scale,
        norm_epsilon,
        query_norm_epsilon,
        HEADS=heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        ROTARY_PAIRS=0 if frequency is None else frequency.shape[0],
        INTERLEAVED=interleaved,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_WIDTH=_BLOCK_WIDTH,
        BLOCK_PAIRS=max(16, triton.next_power_of_2(head_dim // 2)),
        # The interpreter multiplies no bfloat16.
        EXACT=hidden.dtype == torch.float32 or not hidden.is_cuda,
        num_stages=4,
    )


@triton.jit(
    do_not_specialize=["rows", "rotary_scale", "norm_epsilon", "query_norm_epsilon"],
    do_not_specialize_on_alignment=["positions", "slots"],
)
def _forecast(
    hidden,
    projections,
    constants,
    query_norms,
    positions,
    slots,
    frequency,
    out,
    rows,
    hidden_row_stride,
    rotary_scale,
    norm_epsilon,
    query_norm_epsilon,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program forecasts the queries of one head of BLOCK_ROWS rows."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    is_row = row < rows
    slot = tl.load(slots + row, mask=is_row, other=-1)

    # A query is held as two vectors, so that what rotates as a pair meets in one thread.
    pair = tl.arange(0, BLOCK_PAIRS)
    is_pair = pair < HEAD_DIM // 2
    if (ROTARY_PAIRS == 0 or ROTARY_PAIRS == HEAD_DIM // 2) and not INTERLEAVED:
        first_dim, second_dim = pair, pair + HEAD_DIM // 2
    else:
        # Dimensions that do not rotate are paired with their neighbours, and so are all when
        # interleaved.
        apart = (pair < ROTARY_PAIRS) & (not INTERLEAVED)
        first_dim = tl.where(apart, pair, 2 * pair)
        second_dim = tl.where(apart, pair + ROTARY_PAIRS, 2 * pair + 1)

    # The states by the head's projection, and the squares of the states.
    first = tl.zeros((BLOCK_ROWS, BLOCK_PAIRS), dtype=tl.float32)
    second = tl.zeros((BLOCK_ROWS, BLOCK_PAIRS), dtype=tl.float32)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), dtype=tl.float32)
    states = hidden + row.to(tl.int64)[:, None] * hidden_row_stride
    weights = projections + head * WIDTH * HEAD_DIM
    for start in range(0, WIDTH, BLOCK_WIDTH):
        element = start + tl.arange(0, BLOCK_WIDTH)
        inside = element < WIDTH
        state = tl.load(
            states + element[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
        )
        at = weights + element[:, None] * HEAD_DIM
        is_weight = inside[:, None] & is_pair[None, :]
        of_first = tl.load(at + first_dim[None, :], mask=is_weight, other=0.0)
        of_second = tl.load(at + second_dim[None, :], mask=is_weight, other=0.0)
        exact = state.to(tl.float32)
        squares += exact * exact  # summed once, because a sum over a block waits for all threads
        if EXACT:
            state, of_first, of_second = exact, of_first.to(tl.float32), of_second.to(tl.float32)
        first = tl.dot(state, of_first, first, input_precision="ieee")
        second = tl.dot(state, of_second, second, input_precision="ieee")

    # The norm of the state, which is a factor on all of its products.
    scale = (1.0 / tl.sqrt_rn(tl.sum(squares, 1) / WIDTH + norm_epsilon))[:, None]
    own = head * HEAD_DIM
    added_first = tl.load(constants + own + first_dim, mask=is_pair, other=0.0)
    added_second = tl.load(constants + own + second_dim, mask=is_pair, other=0.0)
    first = first * scale + added_first.to(tl.float32)[None, :]
    second = second * scale + added_second.to(tl.float32)[None, :]

    if query_norms is not None:
        mean_square = tl.sum(first * first + second * second, 1) / HEAD_DIM
        scale = (1.0 / tl.sqrt_rn(mean_square + query_norm_epsilon))[:, None]
        norm_first = tl.load(query_norms + own + first_dim, mask=is_pair, other=0.0)
        norm_second = tl.load(query_norms + own + second_dim, mask=is_pair, other=0.0)
        first *= scale * norm_first.to(tl.float32)[None, :]
        second *= scale * norm_second.to(tl.float32)[None, :]

    if ROTARY_PAIRS > 0:
        # The angle less whole turns is small enough for float32.
        rotates = pair < ROTARY_PAIRS
        rate = tl.load(frequency + pair, mask=rotates, other=0.0).to(tl.float64)
        position = tl.load(positions + row, mask=is_row, other=0).to(tl.float64)
        angle = position[:, None] * rate[None, :]
        angle = (angle - tl.floor(angle / _TURN) * _TURN).to(tl.float32)
        size = tl.where(rotates, rotary_scale, 1.0)[None, :]
        cos, sin = tl.cos(angle) * size, tl.sin(angle) * size
        first, second = first * cos - second * sin, second * cos + first * sin

    target = out + (row.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM
    is_wanted = (slot >= 0)[:, None] & is_pair[None, :]
    tl.store(target + first_dim[None, :], first, mask=is_wanted)
    tl.store(target + second_dim[None, :], second, mask=is_wanted)
