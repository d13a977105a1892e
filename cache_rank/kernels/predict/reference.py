"""The query of the next decode step is predicted from recent ones, plain torch: the specification.

This is AsyncSpade (arXiv 2510.07486), section 4.2, equations 2 to 5. The newest query is regressed
on its predecessors, and the same weights, shifted by one token, extrapolate to the next query:

    w(n)       = softmax((A_n A_n^T + eps I)^-1 A_n q_t)      A_n = [q_{t-1}; ...; q_{t-n}]
    q_hat(n)   = sum_i w(n)_i q_{t+1-i}
    q_hat      = mean of q_hat(n) over the window sizes n = 1 .. W

It differs from the printed Algorithm 1 where that contradicts the equations: the softmax takes
plus, not minus, the solution (equation 2); each window is solved for itself instead of masking one
window's weights (equations 4 and 5); and the newest query takes part in the extrapolation
(equation 4).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cache_rank.kernels.rotary.reference import align_to_next_position

PredictionMethod = Literal["last", "spade"]

RIDGE_STRENGTH = 1e-3
"""eps is this share of the mean squared query norm, so that it means the same at any head norm."""


def predict_next_query(queries: Tensor, counts: Tensor, method: PredictionMethod) -> Tensor:
    """Predict the query of the next decode step for every head.

    Args:
        queries: (..., W + 1, D), any float dtype, newest first; entries at or beyond `counts` are
            ignored.
        counts: integers that broadcast to (...), how many queries of each head are valid, at
            least 1.
        method: `last` repeats the newest query; `spade` is the regression above.

    Returns:
        (..., D) float32.

    Raises:
        ValueError: unknown method.
    """
    queries = queries.float()
    valid = torch.arange(queries.shape[-2], device=queries.device) < counts.unsqueeze(-1)
    queries = torch.where(valid.unsqueeze(-1), queries, 0.0)
    if method == "last":
        return queries[..., 0, :]
    if method == "spade":
        weights = _regression_weights(queries, counts)
        predicted = (weights.unsqueeze(-2) @ queries[..., :-1, :]).squeeze(-2)
        # A single query has no predecessor to regress on: repeat it.
        return torch.where((counts > 1).unsqueeze(-1), predicted, queries[..., 0, :])
    raise ValueError(f"unknown query predictor {method!r}: use last or spade")


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
    """Predict the query of the next decode step for every row, layer and head of a group.

    Args:
        query_ring: (slots, layers, Hq, W + 1, D), any float dtype; the query of position p is in
            entry p % (W + 1).
        slots: (R,) int32, the state slot of each row; negative skips the row.
        positions: (R,) int32, the position of each row's newest query.
        counts: (R,) int32, how many of each row's newest queries are valid, 1 to W + 1.
        first_layer: index of the group's first layer in the ring.
        frequency: (rotary_dim / 2,) float32: every query is rotated to the position after the
            newest first (see the rotary reference). None: the queries are used as they are.
        interleaved: pairs of rotated dimensions are neighbours instead of halves.
        method: see `predict_next_query`.
        out: (R, L, Hq, D) float32, written in place; skipped rows keep what they hold.

    Raises:
        ValueError: unknown method.
    """
    row = (slots >= 0).nonzero().squeeze(-1)
    layers, ring = out.shape[1], query_ring.shape[3]
    age = torch.arange(ring, device=query_ring.device)
    entry = (positions[row].to(torch.int64).unsqueeze(-1) - age) % ring  # (rows, W + 1)
    windows = query_ring[slots[row].to(torch.int64), first_layer : first_layer + layers]
    entry = entry.view(-1, 1, 1, ring, 1).expand_as(windows)
    queries = windows.gather(3, entry)  # newest first
    if frequency is not None:
        queries = align_to_next_position(queries, frequency, interleaved)
    out[row] = predict_next_query(queries, counts[row].view(-1, 1, 1), method)


def _regression_weights(queries: Tensor, counts: Tensor) -> Tensor:
    """Weights on [q_t, q_{t-1}, ...], averaged over all window sizes: (..., W).

    One Cholesky factorization serves all windows. With the predecessors newest first, the factor of
    window n is the leading block of the factor L of window W, and so is its inverse. The solution
    of window n is therefore a partial sum: x(n)_i = Σ_{j < n} (L^-1)_{ji} y_j with y = L^-1 A q_t.
    """
    newest, predecessors = queries[..., 0, :], queries[..., 1:, :]
    window = predecessors.shape[-2]
    available = (counts - 1).clamp(min=1).unsqueeze(-1)

    gram = predecessors @ predecessors.transpose(-1, -2)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    ridge = (RIDGE_STRENGTH * trace / available).clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)
    # Not `cholesky`, which raises for the whole batch when one head holds a NaN or overflows.
    factor, _ = torch.linalg.cholesky_ex(gram + torch.diag_embed(ridge.expand(gram.shape[:-1])))
    identity = torch.eye(window, device=gram.device, dtype=gram.dtype).expand_as(gram)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    projected = inverse @ (predecessors @ newest.unsqueeze(-1))  # (..., W, 1)
    solutions = (inverse * projected).cumsum(-2)  # (..., n - 1, i)

    lag = torch.arange(window, device=gram.device)
    inside = lag <= lag.unsqueeze(-1)
    weights = solutions.masked_fill(~inside, -torch.inf).softmax(-1)
    uses_window = (lag < available).to(gram.dtype) / available
    return (uses_window.unsqueeze(-2) @ weights).squeeze(-2)
