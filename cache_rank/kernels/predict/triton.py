"""The query of the next decode step is predicted from recent ones, Triton, all in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.predict.reference import RIDGE_STRENGTH, PredictionMethod

_SMALLEST_RIDGE = torch.finfo(torch.float32).tiny ** 0.5
"""The ridge is at least this, so that queries of zeros have a solution too."""

_METHODS = ("last", "spade")


def predict_step(
    query_ring: Tensor,
    slots: Tensor,
    positions: Tensor,
    counts: Tensor,
    first_layer: int,
    frequency: Tensor | None,
    interleaved: bool,
    method: PredictionMethod,
    out: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two of at least 2."""
    rows, layers, query_heads, head_dim = out.shape
    _, ring_layers, _, ring, _ = query_ring.shape
    if method not in _METHODS:
        raise ValueError(f"unknown query predictor {method!r}: use last or spade")
    assert query_ring.is_contiguous()
    assert query_ring.shape[2::2] == (query_heads, head_dim)
    assert out.is_contiguous()
    assert out.dtype == torch.float32
    rotary_pairs = 0 if frequency is None else frequency.shape[0]
    block = max(2, triton.next_power_of_2(ring - 1))
    _predict[(query_heads, layers, rows)](
        query_ring,
        slots,
        positions,
        counts,
        frequency,
        out,
        first_layer,
        LAYERS=layers,
        RING_LAYERS=ring_layers,
        QUERY_HEADS=query_heads,
        WINDOW=ring - 1,
        HEAD_DIM=head_dim,
        ROTARY_PAIRS=rotary_pairs,
        INTERLEAVED=interleaved,
        METHOD=method,
        RIDGE_STRENGTH=RIDGE_STRENGTH,
        SMALLEST_RIDGE=_SMALLEST_RIDGE,
        BLOCK=block,
        num_warps=max(1, min(8, block * head_dim // 2048)),
    )


@triton.jit
def _rotate(first, second, steps, pair, frequency, ROTARY_PAIRS: tl.constexpr):
    """Rotate pairs of dimensions forward by `steps` positions."""
    rate = tl.load(frequency + pair, mask=pair < ROTARY_PAIRS, other=0.0)
    angle = steps * rate
    cos, sin = tl.cos(angle), tl.sin(angle)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _average_solution(gram, projection, available, BLOCK: tl.constexpr):
    """The mean of all windows' solutions: (BLOCK,) weights on [q_t, q_{t-1}, ...].

    Args:
        gram: (BLOCK, BLOCK) of the predecessors, newest first, with the ridge.
        projection: (BLOCK,), the products of the newest query with the predecessors.
        available: how many predecessors there are, at least 1.
    """
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    # Gaussian elimination of [gram | identity]: the pivot rows, scaled, are those of L^T and L^-1.
    # The solutions are summed up on the way rather than by tl.cumsum, which Triton 3.6 compiles
    # wrongly for one warp where lanes hold copies (BLOCK < HEAD_DIM / 2): the carry from one group
    # of rows to the next is read from a lane that is not the last of its group.
    inverse = tl.where(row == column, 1.0, 0.0)  # [BLOCK, BLOCK]
    solutions = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)  # (n - 1, i)
    for step in range(BLOCK):
        pivot_row = tl.sum(tl.where(row == step, gram, 0.0), 0)[None, :]
        pivot_column = tl.sum(tl.where(column == step, gram, 0.0), 1)[:, None]
        inverse_row = tl.sum(tl.where(row == step, inverse, 0.0), 0)[None, :]
        pivot = tl.sqrt_rn(tl.sum(tl.where(column == step, pivot_row, 0.0), 1)[:, None])
        inverse_row = inverse_row / pivot
        pivot_column = tl.where(row > step, pivot_column / pivot, 0.0)
        gram -= pivot_column * (pivot_row / pivot)
        inverse -= pivot_column * inverse_row
        projected = tl.sum(inverse_row * projection[None, :], 1)[:, None]
        solutions += tl.where(row >= step, inverse_row * projected, 0.0)

    solutions = tl.where(column <= row, solutions, float("-inf"))
    weights = tl.exp(solutions - tl.max(solutions, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    return tl.sum(tl.where(row < available, weights, 0.0), 0) / available


@triton.jit(
    do_not_specialize=["first_layer"],
    do_not_specialize_on_alignment=["slots", "positions", "counts"],
)
def _predict(
    query_ring,
    slots,
    positions,
    counts,
    frequency,
    out,
    first_layer,
    LAYERS: tl.constexpr,
    RING_LAYERS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    METHOD: tl.constexpr,
    RIDGE_STRENGTH: tl.constexpr,
    SMALLEST_RIDGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program predicts the next query of one row, layer and head."""
    # The window: where its entries are in the ring.
    head, layer, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions + row)
    count = tl.load(counts + row)
    queries = query_ring + ((slot * RING_LAYERS + first_layer + layer) * QUERY_HEADS + head) * (
        (WINDOW + 1) * HEAD_DIM
    )

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

    # The newest query, rotated to the position after it.
    newest = queries + position % (WINDOW + 1) * HEAD_DIM
    first = tl.load(newest + first_dim, mask=count > 0, other=0.0).to(tl.float32)  # [D / 2]
    second = tl.load(newest + second_dim, mask=count > 0, other=0.0).to(tl.float32)
    if ROTARY_PAIRS > 0:
        first, second = _rotate(first, second, 1, pair, frequency, ROTARY_PAIRS)

    if METHOD != "last":
        # Its predecessors: lag i is the query of age i + 1.
        lag = tl.arange(0, BLOCK)
        entry = (position + WINDOW - lag) % (WINDOW + 1)
        valid = ((lag < WINDOW) & (lag + 1 < count))[:, None]
        older = queries + entry[:, None] * HEAD_DIM
        # [BLOCK, D / 2]
        older_first = tl.load(older + first_dim[None, :], mask=valid, other=0.0).to(tl.float32)
        older_second = tl.load(older + second_dim[None, :], mask=valid, other=0.0).to(tl.float32)
        if ROTARY_PAIRS > 0:
            older_first, older_second = _rotate(
                older_first,
                older_second,
                lag[:, None] + 2,
                pair[None, :],
                frequency,
                ROTARY_PAIRS,
            )

        # The Gram matrix, (lag, lag), one column at a time.
        gram = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for step in range(WINDOW):
            is_step = lag[:, None] == step
            step_first = tl.sum(tl.where(is_step, older_first, 0.0), 0)
            step_second = tl.sum(tl.where(is_step, older_second, 0.0), 0)
            products = older_first * step_first[None, :] + older_second * step_second[None, :]
            gram = tl.where(lag[None, :] == step, tl.sum(products, 1)[:, None], gram)
        projection = tl.sum(older_first * first[None, :] + older_second * second[None, :], 1)
        available = tl.maximum(count - 1, 1)
        # Its ridge, and the regression.
        diagonal = lag[:, None] == lag[None, :]
        trace = tl.sum(tl.sum(tl.where(diagonal, gram, 0.0), 1), 0)
        ridge = tl.maximum(RIDGE_STRENGTH * trace / available, SMALLEST_RIDGE)
        gram += tl.where(diagonal, ridge, 0.0)
        weights = _average_solution(gram, projection, available, BLOCK)
        # Shifted by one token: weight i goes to the query of age i, which has lag i - 1.
        shifted = tl.where(lag[:, None] + 1 == lag[None, :], weights[None, :], 0.0)
        older_weights = tl.sum(shifted, 1)
        newest_weight = tl.sum(tl.where(lag == 0, weights, 0.0), 0)
        # A single query has no predecessor to regress on: it is repeated.
        newest_weight = tl.where(count > 1, newest_weight, 1.0)

        # The weighted sum of the window is the prediction.
        first = first * newest_weight + tl.sum(older_first * older_weights[:, None], 0)
        second = second * newest_weight + tl.sum(older_second * older_weights[:, None], 0)

    target = out + ((row * LAYERS + layer) * QUERY_HEADS + head) * HEAD_DIM
    tl.store(target + first_dim, first)
    tl.store(target + second_dim, second)
