"""Queries of layers to come are forecast from the hidden state: a product, then Triton."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """See the reference. D is a power of two of at least 2; skipped rows keep what they hold."""
    rows, layers, query_heads, head_dim = out.shape
    width = hidden.shape[1]
    assert hidden.stride(1) == 1
    assert constants.is_contiguous()
    assert query_norms is None or query_norms.is_contiguous()
    assert out.is_contiguous()
    assert out.dtype == torch.float32
    _finish[(layers * query_heads, rows)](
        _products(hidden, projections),
        hidden,
        constants,
        query_norms,
        positions,
        slots,
        frequency,
        out,
        hidden.stride(0),
        rotary_scale,
        norm_epsilon,
        query_norm_epsilon,
        HEADS=layers * query_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROTARY_PAIRS=0 if frequency is None else frequency.shape[0],
        INTERLEAVED=interleaved,
    )


def _products(hidden: Tensor, projections: Tensor) -> Tensor:
    """The state, not normalized, by the projections: (R, L * Hq * D) float32.

    A state has elements of a few thousand in some models, for which float16 has no room.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, projections, out_dtype=torch.float32)
    return hidden.float() @ projections.float()


@triton.jit(
    do_not_specialize=["rotary_scale", "norm_epsilon", "query_norm_epsilon"],
    do_not_specialize_on_alignment=["positions", "slots"],
)
def _finish(
    products,
    hidden,
    constants,
    query_norms,
    positions,
    slots,
    frequency,
    out,
    hidden_row_stride,
    rotary_scale,
    norm_epsilon,
    query_norm_epsilon,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One program finishes the query of one head of one row."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(slots + row) < 0:
        return

    # What the norm of the state divides by.
    element = tl.arange(0, BLOCK)
    state = tl.load(hidden + row * hidden_row_stride + element, mask=element < WIDTH, other=0.0)
    state = state.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(state * state, 0) / WIDTH + norm_epsilon)

    # A query is held as two vectors, so that what rotates as a pair meets in one thread.
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, HALF)
    if (ROTARY_PAIRS == 0 or ROTARY_PAIRS == HALF) and not INTERLEAVED:
        first_dim, second_dim = pair, pair + HALF
    else:
        # Dimensions that do not rotate are paired with their neighbours, and so are all when
        # interleaved.
        apart = (pair < ROTARY_PAIRS) & (not INTERLEAVED)
        first_dim = tl.where(apart, pair, 2 * pair)
        second_dim = tl.where(apart, pair + ROTARY_PAIRS, 2 * pair + 1)
    own = head * HEAD_DIM
    product = products + row * HEADS * HEAD_DIM + own
    first = tl.load(product + first_dim) * scale  # [D / 2]
    second = tl.load(product + second_dim) * scale
    first += tl.load(constants + own + first_dim).to(tl.float32)
    second += tl.load(constants + own + second_dim).to(tl.float32)

    if query_norms is not None:
        mean_square = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / HEAD_DIM
        scale = 1.0 / tl.sqrt_rn(mean_square + query_norm_epsilon)
        first *= scale * tl.load(query_norms + own + first_dim).to(tl.float32)
        second *= scale * tl.load(query_norms + own + second_dim).to(tl.float32)

    if ROTARY_PAIRS > 0:
        # The angle less whole turns is small enough for float32.
        rotates = pair < ROTARY_PAIRS
        rate = tl.load(frequency + pair, mask=rotates, other=0.0).to(tl.float64)
        angle = tl.load(positions + row).to(tl.float64) * rate
        angle = (angle - tl.floor(angle / _TURN) * _TURN).to(tl.float32)
        size = tl.where(rotates, rotary_scale, 1.0)
        cos, sin = tl.cos(angle) * size, tl.sin(angle) * size
        first, second = first * cos - second * sin, second * cos + first * sin

    target = out + row * HEADS * HEAD_DIM + own
    tl.store(target + first_dim, first)
    tl.store(target + second_dim, second)
