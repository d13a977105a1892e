"""Attention to tokens that lie beside each other, and how parts of it are merged."""

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


def attend_to_ring(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    group_tokens: int,
    scale: float,
    older: tuple[Tensor, Tensor],
    out: Tensor,
    log_sums: Tensor,
) -> None:
    """Attend to what rings hold of tokens that are no codes, and merge it with attention to codes.

    Args:
        queries: (R, Q, Hq, D), any float dtype, of later tokens.
        keys, values: (slots, n, Hkv, D), any float dtype and strides but 1 of D; the token at
            position p is in entry p % n.
        slots: (R,) int32, the ring of each row; a row with a negative one has no token.
        positions: (R,) int32, of each row's newest token.
        group_tokens: complete groups of so many tokens are codes, but for the newest of them: a
            ring has room for one group more.
        scale: factor on the logits.
        older: outputs (R, Q, Hq, D) and log-sum-exps (R, Q, Hq) over older tokens, float32.
        out, log_sums: those over all tokens, written in place; outputs in any float dtype.
    """
    held, ring = torch.where(slots < 0, 0, positions + 1), keys.shape[1]
    coded = held // group_tokens * group_tokens - (ring - group_tokens)
    coded = coded.clamp(min=0)
    behind = (torch.arange(ring, device=held.device) - coded[:, None]) % ring
    is_seen = (behind < (held - coded)[:, None]).unsqueeze(1)
    slots = slots.clamp(min=0).long()
    own_keys, own_values = (part[slots].transpose(1, 2) for part in (keys, values))
    merged = merge(older, attend_to(queries, own_keys, own_values, is_seen, scale))
    out.copy_(merged[0])
    log_sums.copy_(merged[1])


def attend_to_each_other(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    scale: float,
    older: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> None:
    """Let consecutive tokens attend to each other, causally, and merge it with that to older ones.

    Args:
        queries: (B, Q, Hq, D), any float dtype and strides but 1 of D.
        keys, values: (B, Q, Hkv, D), alike.
        rows: (R,) int64, which of B.
        scale: factor on the logits.
        older: outputs (R, Q, Hq, D), any float dtype, and log-sum-exps (R, Q, Hq) float32 over
            older tokens, if there are any.
        out: (B, Q, Hq, D), any float dtype; `rows` are written.
    """
    width = queries.shape[1]
    is_seen = torch.ones((1, width, width), dtype=torch.bool, device=queries.device).tril()
    own_keys, own_values = (part[rows].transpose(1, 2) for part in (keys, values))
    attended = attend_to(queries[rows], own_keys, own_values, is_seen, scale)
    if older is not None:
        attended = merge((older[0].float(), older[1]), attended)
    out.index_copy_(0, rows, attended[0].to(out.dtype))
