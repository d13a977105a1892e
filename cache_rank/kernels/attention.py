"""Attention to tokens that lie beside each other, plain torch, and how parts of it are merged."""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.kernels.coded.reference import by_kv_head, by_query


def attend_to(
    queries: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to some tokens of each row. What is not seen may be anything, even no number.

    Args:
        queries: (R, Q, Hq, D), any float dtype.
        keys, values: (R, Hkv, n, D), any float dtype.
        is_seen: (R or 1, Q or 1, n) bool, which tokens a query sees.
        scale: factor on the logits.

    Returns:
        Outputs (R, Q, Hq, D) and log-sum-exps (R, Q, Hq), float32; 0 and minus infinity of a query
        that sees nothing.
    """
    grouped = by_kv_head(queries, keys.shape[1])  # (R, Hkv, Q G, D)
    group = queries.shape[2] // keys.shape[1]
    seen = is_seen.expand(-1, queries.shape[1], -1).repeat_interleave(group, dim=1).unsqueeze(1)
    logits = (grouped @ keys.float().mT) * scale
    logits = logits.masked_fill(~seen, -torch.inf)
    log_sums = logits.logsumexp(dim=-1)
    weights = (logits - log_sums.clamp(min=-1e30).unsqueeze(-1)).exp()
    hidden = ~is_seen.any(dim=1)[:, None, :, None]
    out = weights @ values.float().masked_fill(hidden, 0)
    return by_query(out, queries), by_query(log_sums, queries)


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries to different tokens.

    Outputs are (..., D) and log-sum-exps (...), float32, minus infinity where there are no tokens.
    """
    (out, log_sums), (other_out, other_sums) = one, other
    total = torch.logaddexp(log_sums, other_sums)
    share = (log_sums - total.clamp(min=-1e30)).exp().unsqueeze(-1)
    return other_out + share * (out - other_out), total
