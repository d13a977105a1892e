"""Queries of layers to come are forecast from the hidden state, plain torch: the specification.

The hidden state, which is the sum of what the embedding and all layers so far have added, changes
little from layer to layer, and it knows the newest token. So the input x of an earlier layer tells
the query of layer l nearly as well as its own input would:

    q = rotary(query_norm([norm(x), 1] W_l), position)

W_l is the query projection of layer l with the weights of its input norm multiplied in, so that
`norm` here has none; it may have a correction that is fitted to states of that earlier layer. Its
last row, which the 1 is for, is a constant. Forecasts from one layer before, unfitted, are
InfiniGen's (arXiv 2406.19707).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.rotary.reference import rotate_to


class ForecastWorkspace(NamedTuple):
    """Scratch of one launch. The reference needs none; these are the shapes of triton.py.

    Units are heads of a layer and blocks of rows. Several programs share the sums of a unit.

    Attributes:
        partial: (units, parts, sums) float32, what each of them has summed up.
        arrived: (units,) int32, how many of them have; 0 between launches.
    """

    partial: Tensor
    arrived: Tensor


def forecast_workspace(
    rows: int, layers: int, query_heads: int, head_dim: int, device: torch.device
) -> ForecastWorkspace:
    """Make scratch for `rows` rows: this implementation needs none."""
    nothing = torch.empty(0, device=device)
    return ForecastWorkspace(nothing, nothing)


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
    """Forecast the queries of every row, layer and head of a group.

    Args:
        hidden: (R, H), the state that entered the earlier layer; contiguous but for the rows.
        projections: (L, Hq, H, D), of hidden states that are normalized.
        constants: (L, Hq, D), added to what they give.
        query_norms: (L, Hq, D), weights of the root mean square norm of each head; None has none.
        positions: (R,) int32, the position of each row's token, which is being decoded.
        slots: (R,) int32; negative skips the row.
        frequency: (rotary_dim / 2,) float32; None rotates nothing.
        interleaved: pairs of rotated dimensions are neighbours instead of halves.
        rotary_scale: factor on rotated dimensions.
        norm_epsilon, query_norm_epsilon: added to mean squares.
        workspace: what `forecast_workspace` made.
        out: (R, L, Hq, D) float32, written in place; skipped rows keep what they hold.
    """
    row = (slots >= 0).nonzero().squeeze(-1)
    state = hidden[row].float()
    state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + norm_epsilon)
    queries = torch.einsum("rh,lqhd->rlqd", state, projections.float()) + constants.float()
    if query_norms is not None:
        mean_square = queries.square().mean(-1, keepdim=True)
        queries = queries * torch.rsqrt(mean_square + query_norm_epsilon) * query_norms.float()
    if frequency is not None:
        queries = rotate_to(queries, positions[row], frequency, interleaved, rotary_scale)
    out[row] = queries
