"""Rotary position embedding, plain torch: the specification.

The rotation is that of RoFormer (arXiv 2104.09864), section 3.4. The kernels that need it are in
`predict` and `forecast`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def align_to_next_position(queries: Tensor, inverse_frequency: Tensor, interleaved: bool) -> Tensor:
    """Rotate each query of a window forward to the position of the token to come.

    A query that was rotated to position i becomes what it would have been at position t + 1. To
    undo each rotation, predict, and rotate to t + 1 is the same as to predict among queries that
    all carry the rotation of t + 1, because Gram matrices do not change under a common rotation. So
    only angles of at most W + 1 positions are needed.

    Args:
        queries: (..., W + 1, D), newest first: entry i stands at position t - i.
        inverse_frequency: (R / 2,) float32, the rotary frequencies of the model; R <= D dimensions
            are rotated and the rest pass through.
        interleaved: dimensions that rotate as a pair are neighbours (GPT-J) instead of in the two
            halves (NeoX, Llama, Qwen).

    Returns:
        (..., W + 1, D) float32.
    """
    queries = queries.float()
    steps = torch.arange(1, queries.shape[-2] + 1, device=queries.device, dtype=torch.float32)
    angle = steps.unsqueeze(-1) * inverse_frequency  # (W + 1, R / 2)
    return _rotate(queries, angle.cos(), angle.sin(), interleaved)


def rotate_to(
    queries: Tensor, positions: Tensor, frequency: Tensor, interleaved: bool, scale: float
) -> Tensor:
    """Rotate queries, which no position is in yet, to the position of their row.

    Args:
        queries: (R, ..., D) float32.
        positions: (R,) integer.
        frequency, interleaved: see `align_to_next_position`.
        scale: factor on the dimensions that are rotated.
    """
    # In float64, because an angle may be of as many radians as there are tokens.
    angle = positions.double()[:, None] * frequency.double()
    shape = (-1, *[1] * (queries.dim() - 2), frequency.shape[0])
    cos, sin = (part.float().view(shape) * scale for part in (angle.cos(), angle.sin()))
    return _rotate(queries, cos, sin, interleaved)


def _rotate(queries: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first dimensions of each query, two by two."""
    rotary_dim = 2 * cos.shape[-1]
    rotary, passed = queries[..., :rotary_dim], queries[..., rotary_dim:]
    if interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, passed), dim=-1)
