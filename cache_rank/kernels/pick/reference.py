"""The tokens that a decode step attends to are picked from scores, plain torch: the specification.

Scores come as 16-bit keys in the order of the scores. The best k keys of the tokens between the
first and the newest ones are picked; of equal keys the earlier tokens are. What is written is where
each token lies in the pool, in the order of the tokens: sinks, picked, recent.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEY_UNIT = 2048
"""Keys that a nat has."""

KEY_ZERO = 24 * KEY_UNIT
"""The key of the score 0, which is the log-probability of a token that has all the attention."""

KEY_MOST = (1 << 16) - 1


def to_keys(scores: Tensor) -> Tensor:
    """Round log-probabilities to keys from 0 to 65535, int32; NaN is 0."""
    keys = (scores * KEY_UNIT + KEY_ZERO).round().clamp(0, KEY_MOST)
    return keys.nan_to_num(0.0).to(torch.int32)


def pick_tokens(
    keys: Tensor,
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    sinks: int,
    recent: int,
    out: Tensor,
) -> None:
    """Pick the tokens of every request that is sparse; out of others nothing is written.

    Args:
        keys: (B, Hkv, capacity) uint16, of tokens 0 to length - 1.
        row_table: (slots, context) int32, where the tokens of each slot lie in the pool.
        slots: (B,) the slot of each request.
        lengths: (B,) tokens of each request, the current one included.
        sparse_from: (slots,) int32, the length from which the request of a slot is sparse. It is
            more than sinks and recent tokens.
        sinks, recent: so many first and newest tokens are always attended to.
        out: (B, Hkv, sinks + k + recent) int32, rows of the pool, written in place. Of a request
            with fewer tokens these are all, and come first.
    """
    budget = out.shape[-1] - sinks - recent
    for request, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length < sparse_from[slot]:
            continue
        candidates = keys[request, :, sinks : length - recent].to(torch.int32)
        order = candidates.argsort(dim=-1, descending=True, stable=True)
        picked = order[:, :budget].sort(dim=-1).values + sinks
        first = torch.arange(sinks, device=keys.device).expand(len(picked), -1)
        newest = torch.arange(length - recent, length, device=keys.device).expand(len(picked), -1)
        attended = torch.cat((first, picked, newest), dim=-1)
        out[request, :, : attended.shape[-1]] = row_table[slot, attended]
