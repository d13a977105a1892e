"""Every cached token is scored for every kv head, plain torch: the specification.

The query heads of a kv head share the tokens that are selected for it (AsyncSpade section 4.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.rows import PagedRows


def score_tokens(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Score every cached token of one sequence for every kv head.

    A token's score is the largest log-probability that any query head of the group gives it. Raw
    logits of different heads are not comparable, and their mean hides a head that needs the token.
    MHA has one query head a group, and MQA has one group.

    Args:
        queries: (L, Hq, D) predicted queries, any float dtype.
        keys: (L, Hkv, T, D) resident keys, any float dtype; Hkv divides Hq.
        scale: factor on the logits, usually D ** -0.5.

    Returns:
        (L, Hkv, T) float32, at most 0.
    """
    layers, kv_heads, _, head_dim = keys.shape
    grouped = queries.float().reshape(layers, kv_heads, -1, head_dim)
    logits = (grouped @ keys.float().transpose(-1, -2)) * scale  # (L, Hkv, G, T)
    return torch.log_softmax(logits, dim=-1).amax(dim=-2)


class ScoreWorkspace(NamedTuple):
    """Scratch of one launch. The reference needs none; these are the shapes of triton.py.

    Units are rows, layers and kv heads; PADDED is the query heads of a kv head, padded to a power
    of two.

    Attributes:
        logits: (units, capacity, PADDED) float32.
        partial: (units, chunks, 2, PADDED) float32, each chunk's largest logit and the sum of
            exponentials relative to it.
    """

    logits: Tensor
    partial: Tensor


def score_workspace(
    rows: int, layers: int, kv_heads: int, group: int, capacity: int, device: torch.device
) -> ScoreWorkspace:
    """Make scratch for `rows` rows of up to `capacity` tokens: none."""
    empty = torch.empty(0, device=device)
    return ScoreWorkspace(empty, empty)


def score_step(
    queries: Tensor,
    key_pool: Tensor,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: ScoreWorkspace,
    out: Tensor,
) -> None:
    """Score the resident tokens of every row of a step, read through the page table.

    Args:
        queries: (R, L, Hq, D) float32.
        key_pool: (pages, layers, Hkv, P, D), any float dtype.
        rows: the rows of the step; tokens [0, position] of each are scored.
        first_layer: index of the first of the L layers in the pool.
        scale: factor on the logits.
        workspace: what `score_workspace` made.
        out: (R, L, Hkv, capacity) float32, written in place; entries of other tokens keep what they
            hold.
    """
    layers = slice(first_layer, first_layer + queries.shape[1])
    for row, _, position in rows.used():
        keys = rows.resident(key_pool, layers, row, position)
        out[row, :, :, : position + 1] = score_tokens(queries[row], keys, scale)
