"""Rotary position embedding by a number of positions, plain torch: the specification.

The rotation is that of RoFormer (arXiv 2104.09864), section 3.4. The kernel that needs it is in
`predict`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def align_to_next_position(queries: Tensor, inverse_frequency: Tensor, interleaved: bool) -> Tensor:
    """Rotate each query of a window forward to the position of the token to come.

    A query that was rotated to position i becomes what it would have been at position t + 1. This
    is the `pre` frame of the predictor. To undo each rotation, predict, and rotate to t + 1 is the
    same as to predict among queries that all carry the rotation of t + 1, because Gram matrices do
    not change under a common rotation. So only angles of at most W + 1 positions are needed.

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
    rotary_dim = 2 * inverse_frequency.shape[0]
    steps = torch.arange(1, queries.shape[-2] + 1, device=queries.device, dtype=torch.float32)
    angle = steps.unsqueeze(-1) * inverse_frequency  # (W + 1, R / 2)
    cos, sin = angle.cos(), angle.sin()
    rotary, passed = queries[..., :rotary_dim], queries[..., rotary_dim:]
    if interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, passed), dim=-1)
