"""Sketches of the keys in rows of SGLang's KV pool, plain torch: the specification.

A sketch lies where its key does: the sketches of a layer have one entry a pool row. So whatever
shares, frees or hands on a row does the same with its sketch. kernels/sketch/reference.py says what
a sketch is; all functions here are of one layer, and a `Sketch` of it has one layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.pick.reference import to_keys
from cache_rank.kernels.sketch.reference import (
    Sketch,
    SketchShape,
    encode_keys,
    query_weights,
    unpack_int2,
)


class RowScratch(NamedTuple):
    """Scratch of one scoring, of so many requests and tokens at most.

    The reference needs none; these are the shapes of triton.py. PADDED is the query heads of a KV
    head, padded to a power of two.

    Attributes:
        weights: (B, Hq, 4 · bytes) float32, what queries give the crumbs.
        logits: (B · Hkv, capacity, PADDED) float16.
        sums: (B · Hkv, chunks, 2, PADDED) float32, each chunk's largest logit, and the sum of
            exponentials relative to it.
    """

    weights: Tensor
    logits: Tensor
    sums: Tensor


def encode_rows(
    keys: Tensor, rows: Tensor, sketch: Sketch, shape: SketchShape, codes: Tensor
) -> None:
    """Encode the keys that are written to some rows.

    Args:
        keys: (n, Hkv, D), any strides but that of D, any float dtype.
        rows: (n,) int32 or int64.
        sketch, shape: of the layer.
        codes: (Hkv, pool rows, bytes) uint8, written in place.
    """
    codes[:, rows.long()] = encode_keys(keys.transpose(0, 1).unsqueeze(0), sketch, shape)[0]


def score_rows(
    queries: Tensor,
    codes: Tensor,
    sketch: Sketch,
    shape: SketchShape,
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    scale: float,
    scratch: RowScratch,
    out: Tensor,
) -> None:
    """Score the tokens of every request that is sparse; out of others nothing is written.

    A score is the largest log-probability of its token over the query heads of a KV head, where
    probabilities are over all tokens of the request.

    Args:
        queries: (B, Hq, D), any float dtype and any stride of B.
        codes: (Hkv, pool rows, bytes) uint8.
        sketch, shape: of the layer.
        row_table: (slots, context) int32, where the tokens of each slot lie in the pool.
        slots: (B,) the slot of each request.
        lengths: (B,) tokens of each request, the current one included.
        sparse_from: (slots,) int32, the length from which the request of a slot is sparse.
        scale: factor on the logits.
        scratch: of at least so many requests and tokens.
        out: (B, Hkv, capacity) uint16, keys of the scores of tokens 0 to length - 1, see
            kernels/pick; written in place.
    """
    for request, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length < sparse_from[slot]:
            continue
        rows = row_table[slot, :length].long()
        weights = query_weights(queries[request].float().unsqueeze(0), sketch, scale)[0]
        logits = weights @ unpack_int2(codes[:, rows]).mT  # (Hkv, G, T)
        scores = (logits - logits.logsumexp(-1, keepdim=True)).amax(dim=-2)
        out[request, :, :length] = to_keys(scores).to(torch.uint16)


def row_scratch(
    requests: int, query_heads: int, kv_heads: int, capacity: int, codes: Tensor
) -> RowScratch:
    """Make scratch for so many requests of up to `capacity` tokens; of the reference it is empty.

    One scoring after another may use it on one stream.
    """
    empty = codes.new_empty(0, dtype=torch.float32)
    return RowScratch(empty, empty, empty)
