"""Attention of a decode step over rows of the KV pool, plain torch: the specification.

A request that is sparse attends, by KV head, to the rows that were picked for it; any other to all
of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    picked: Tensor,
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    budgets: Tensor,
    always: int,
    scale: float,
    out: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    batch_invariant: bool = False,
) -> None:
    """Attend to the tokens of a decode step.

    Args:
        queries: (B, Hq, D).
        keys, values: (rows, Hkv, D), the pool of a layer; the current tokens are there.
            FP8 or a type as wide as that of the queries.
        picked: (B, Hkv, W) int32, of each sparse request the rows that it attends to, and
            anything behind them; see `select_rows`.
        row_table: (slots, context) int32, where the tokens of each slot lie in the pool.
        slots: (B,) the slot of each request.
        lengths: (B,) tokens of each request, the current one included.
        sparse_from: (slots,) int32, the length from which the request of a slot is sparse.
        budgets: (B,) int32, how many tokens were picked of each sparse request, if it has them.
        always: tokens that each attends to beside those; they are among the rows.
        scale: factor on the logits.
        out: (B, Hq, D), written in place.
        k_scale, v_scale: factors on the keys and values of an FP8 pool.
        batch_invariant: whether rounding, too, must depend on nothing but the request.
    """
    kv_heads = keys.shape[1]
    head = torch.arange(kv_heads, device=keys.device).unsqueeze(-1)
    requests = zip(slots.tolist(), lengths.tolist(), budgets.tolist(), strict=True)
    for request, (slot, length, budget) in enumerate(requests):
        if length < sparse_from[slot]:
            rows = row_table[slot, :length].expand(kv_heads, -1)
        else:
            rows = picked[request, :, : min(length, budget + always)]
        key, value = (pool[rows.long(), head].float() for pool in (keys, values))  # (Hkv, n, D)
        query = queries[request].float().unflatten(0, (kv_heads, -1))  # (Hkv, G, D)
        weights = (query @ key.mT * (scale * k_scale)).softmax(-1)
        out[request] = (weights @ value * v_scale).flatten(0, 1).to(out.dtype)
