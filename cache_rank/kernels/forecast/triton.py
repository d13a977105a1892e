"""Queries of layers to come are forecast from the hidden state, Triton.

One launch. A head's weights are read by several programs, each of which multiplies a part of the
states, because one would keep too few bytes under way; the last to arrive adds up what they have
and does the rest. A row's sums are in the same order whatever other rows there are, and whoever
arrives last.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.forecast.reference import ForecastWorkspace

_BLOCK_ROWS = 16
_MOST_BLOCK_ROWS = 32
"""A program multiplies so many rows: few, or more where there are more."""

_BLOCK_WIDTH = 64
"""A step of a program multiplies so many elements of their states."""

_PARTS = 2
"""So many programs share the elements of the states."""

_TURN = tl.constexpr(2 * math.pi)


def forecast_workspace(
    rows: int, layers: int, query_heads: int, head_dim: int, device: torch.device
) -> ForecastWorkspace:
    """Make scratch for `rows` rows. One launch after another may use it on one stream."""
    units = layers * query_heads * triton.cdiv(rows, _block_rows(rows))
    sums = _block_rows(rows) * (2 * _block_pairs(head_dim) + 1)
    return ForecastWorkspace(
        partial=torch.empty((units, _PARTS, sums), device=device),
        arrived=torch.zeros(units, dtype=torch.int32, device=device),
    )


def _block_rows(rows: int) -> int:
    return _BLOCK_ROWS if rows <= _BLOCK_ROWS else _MOST_BLOCK_ROWS


def _block_pairs(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim // 2)))


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
    workspace: ForecastWorkspace,
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
    heads, blocks = layers * query_heads, triton.cdiv(rows, _block_rows(rows))
    assert workspace.arrived.numel() >= heads * blocks
    # The blocks of a head come one after the other, so that they share its weights in the L2 cache.
    _forecast[(blocks, heads, _PARTS)](
        hidden,
        projections,
        constants,
        query_norms,
        positions,
        slots,
        frequency,
        *workspace,
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
        BLOCK_ROWS=_block_rows(rows),
        BLOCK_WIDTH=_BLOCK_WIDTH,
        BLOCK_PAIRS=_block_pairs(head_dim),
        PARTS=_PARTS,
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
    partial,
    arrived,
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
    PARTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """PARTS programs forecast the queries of one head of BLOCK_ROWS rows."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
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
    part = tl.program_id(2)
    SHARE: tl.constexpr = (WIDTH + PARTS * BLOCK_WIDTH - 1) // (PARTS * BLOCK_WIDTH) * BLOCK_WIDTH
    for start in range(part * SHARE, tl.minimum((part + 1) * SHARE, WIDTH), BLOCK_WIDTH):
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

    # The last program to arrive adds up what all have.
    unit = head * tl.num_programs(0) + tl.program_id(0)
    SIZE: tl.constexpr = BLOCK_ROWS * (2 * BLOCK_PAIRS + 1)
    index = tl.arange(0, BLOCK_ROWS)
    first_at = partial + unit * PARTS * SIZE + index[:, None] * BLOCK_PAIRS + pair[None, :]
    second_at = first_at + BLOCK_ROWS * BLOCK_PAIRS
    squares_at = partial + unit * PARTS * SIZE + 2 * BLOCK_ROWS * BLOCK_PAIRS + index
    tl.store(first_at + part * SIZE, first)
    tl.store(second_at + part * SIZE, second)
    tl.store(squares_at + part * SIZE, tl.sum(squares, 1))
    tl.debug_barrier()
    if tl.atomic_add(arrived + unit, 1, sem="acq_rel") < PARTS - 1:
        return
    tl.store(arrived + unit, 0)  # for the next launch
    first = tl.zeros((BLOCK_ROWS, BLOCK_PAIRS), dtype=tl.float32)
    second = tl.zeros((BLOCK_ROWS, BLOCK_PAIRS), dtype=tl.float32)
    square = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for index in tl.static_range(PARTS):
        # Other multiprocessors wrote them, so they are read from the L2 cache.
        first += tl.load(first_at + index * SIZE, cache_modifier=".cg")
        second += tl.load(second_at + index * SIZE, cache_modifier=".cg")
        square += tl.load(squares_at + index * SIZE, cache_modifier=".cg")

    # The norm of the state, which is a factor on all of its products.
    scale = (1.0 / tl.sqrt_rn(square / WIDTH + norm_epsilon))[:, None]
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
