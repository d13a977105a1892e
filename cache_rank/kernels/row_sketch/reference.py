"""Sketches of the keys in rows of SGLang's KV pool, plain torch: the specification.

A sketch lies where its key does: the sketches of a layer have one entry a pool row. So whatever
shares, frees or hands on a row does the same with its sketch. kernels/sketch/reference.py says what
a sketch is; all functions here are of one layer, and a `Sketch` of it has one layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.sketch.reference import (
    Sketch,
    SketchShape,
    encode_keys,
    query_weights,
    unpack_int2,
)

KEY_UNIT = 16
"""Steps that a nat has, to which logits are rounded: errors of sketches are far larger."""

KEY_MOST = 255
"""The key of the score 0, which is the log-probability of a token that has all the attention."""

TILE = 32
"""Logits of so many tokens are held relative to the largest of them.

Those that do not fit a byte are so small that their key is 0."""


class RowScratch(NamedTuple):
    """Scratch of one selection, of so many requests and tokens at most.

    The reference needs none; these are the shapes of triton.py. PADDED is the query heads of a KV
    head, padded to a power of two.

    Attributes:
        weights: (B, Hq, 4 · bytes) float32, what queries give the elements.
        logits: (B · Hkv, PADDED, capacity) uint8, in steps, KEY_MOST for the largest of a tile.
        tops: (B · Hkv, PADDED, capacity / TILE) int32, the largest logit of each tile, in steps.
        sums: (B · Hkv, chunks, 2, PADDED) float32, each chunk's largest logit in units of log 2,
            and the sum of exponentials relative to it.
        keys: (B · Hkv, 8, capacity / 8) uint8, bit planes: of the key of token t, bit b is bit
            t % 8 of byte t // 8 of plane b.
        marks: (B · Hkv, 2, capacity / 32) int32, the tokens that are picked, as in a plane; and
            how many these are before each word.
    """

    weights: Tensor
    logits: Tensor
    tops: Tensor
    sums: Tensor
    keys: Tensor
    marks: Tensor


def encode_rows(
    keys: Tensor, rows: Tensor, sketch: Sketch, shape: SketchShape, codes: Tensor
) -> None:
    """Encode the keys that are written to some rows.

    Args:
        keys: (n, Hkv, D), any strides but that of D, any float dtype.
        rows: (n,) int32 or int64.
        sketch, shape: of the layer.
        codes: (pool rows, Hkv, bytes) uint8, written in place.
    """
    of_heads = encode_keys(keys.transpose(0, 1).unsqueeze(0), sketch, shape)[0]
    codes[rows.long()] = of_heads.transpose(0, 1)


def select_rows(
    queries: Tensor,
    codes: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    budgets: Tensor,
    scale: float,
    sinks: int,
    recent: int,
    scratch: RowScratch,
    out: Tensor,
) -> None:
    """Pick the tokens of every request that is sparse; out of others nothing is written.

    Args:
        queries: (B, Hq, D), any float dtype and any stride of B.
        codes: (pool rows, Hkv, bytes) uint8. The current token's need not be there yet.
        sketch, shape: of the layer.
        row_table: (slots, context) int32, where the tokens of each slot lie in the pool.
        slots: (B,) the slot of each request.
        lengths: (B,) tokens of each request, the current one included.
        sparse_from: (slots,) int32, the length from which the request of a slot is sparse. It is
            more than sinks and recent tokens.
        budgets: (B,) int32, how many tokens between the first and the newest ones each request
            attends to, at most as many as `out` has room for.
        scale: factor on the logits.
        sinks, recent: so many first and newest tokens are always attended to, the current one
            among the newest.
        scratch: of at least so many requests and tokens.
        out: (B, Hkv, sinks + most + recent) int32, rows of the pool in the order of the tokens,
            written in place. Those that a request attends to come first, all that it has if they
            are no more than its budget; behind them is anything.
    """
    assert recent >= 1
    requests = zip(slots.tolist(), lengths.tolist(), budgets.tolist(), strict=True)
    for request, (slot, length, budget) in enumerate(requests):
        if length < sparse_from[slot]:
            continue
        rows = row_table[slot, :length].long()
        weights = query_weights(queries[request].float().unsqueeze(0), sketch, scale)[0]
        keys = score_rows(weights, codes[rows[:-1]].transpose(0, 1))
        attended = rows[pick(keys, length, sinks, recent, budget)]
        out[request, :, : attended.shape[-1]] = attended


def score_rows(weights: Tensor, codes: Tensor) -> Tensor:
    """Score the tokens of a request before the current one.

    A score is the largest log-probability of its token over the query heads of a KV head, where
    probabilities are over all these tokens.

    Args:
        weights: (Hkv, G, 4 · bytes), what queries give the elements.
        codes: (Hkv, T, bytes) uint8.

    Returns:
        (Hkv, T) keys of the scores.
    """
    return to_keys(weights @ unpack_int2(codes).mT)


def to_keys(logits: Tensor) -> Tensor:
    """Round logits, (..., G, T), and their log-sum-exps to keys of 0 to 255, (..., T) uint8.

    Of what is no number the key is 0.
    """
    steps, log_sums = (
        (numbers * KEY_UNIT).round() for numbers in (logits, logits.logsumexp(-1, keepdim=True))
    )
    keys = (steps - log_sums).amax(dim=-2) + KEY_MOST
    return keys.clamp(0, KEY_MOST).nan_to_num(0.0).to(torch.uint8)


def pick(keys: Tensor, length: int, sinks: int, recent: int, budget: int) -> Tensor:
    """Pick the best keys of the tokens between the first and the newest ones.

    Args:
        keys: (Hkv, length - 1) uint8.
        length: tokens of the request.
        sinks, recent: so many first and newest tokens are attended to whatever their keys.
        budget: so many others are; of equal keys the earlier tokens.

    Returns:
        (Hkv, attended) tokens in their order.
    """
    candidates = keys[:, sinks : length - recent]
    order = candidates.argsort(dim=-1, descending=True, stable=True)
    picked = order[:, :budget].sort(dim=-1).values + sinks
    first = torch.arange(sinks, device=keys.device).expand(len(keys), -1)
    newest = torch.arange(length - recent, length, device=keys.device).expand(len(keys), -1)
    return torch.cat((first, picked, newest), dim=-1)


def row_scratch(
    requests: int, query_heads: int, kv_heads: int, capacity: int, codes: Tensor
) -> RowScratch:
    """Make scratch for so many requests of up to `capacity` tokens; of the reference it is empty.

    One selection after another may use it on one stream.
    """
    empty = codes.new_empty(0, dtype=torch.float32)
    return RowScratch(empty, empty, empty, empty, empty, empty)
