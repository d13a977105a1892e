"""Token scoring with a shared token set per query-head group, plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def score_tokens(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Score every cached token for every kv head (AsyncSpade section 4.2).

    A token's score is the largest log-probability that any query head of the group gives it:
    raw logits of different heads are not comparable, and their mean hides a head that needs the
    token. MHA has one query head a group, MQA has one group.

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
