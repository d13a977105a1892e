"""Sketches of a KV pool's rows, and what a decode step selects by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.attend import attend_rows
from cache_rank.kernels.row_sketch import encode_rows, row_scratch, select_rows
from cache_rank.kernels.sketch.reference import Sketch, make_sketch, sketch_shape
from sglang_ext.calibration.key_statistics import KeyMoments
from sglang_ext.flags import CacheRankFlags
from sglang_ext.pools import attention_layers
from sglang_ext.refusals import UnsupportedError

REQUESTS_AT_ONCE = 64
"""Requests that are scored in one go; scratch is of so many."""

NEVER = torch.iinfo(torch.int32).max
"""The length from which a request is sparse that stays dense."""


class Heads(NamedTuple):
    """The attention layers of one tensor-parallel rank that may be sparse."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


class Selection:
    """Selects for every sparse layer of one scheduler process; layers count from the first.

    Attributes:
        sparse_from: (request slots,) int32, the length from which the request of a slot is sparse.
        step_is_sparse: whether the decode step under way, or being captured, may have a sparse
            request; all others are SGLang's own.
        moments: by layer, of the tokens that a calibration prefills; None outside of one.
    """

    def __init__(self, args: CacheRankFlags, heads: Heads, codes: Tensor, row_table: Tensor):
        """Take memory; what is encoded means nothing until `load_basis` has brought the bases.

        Args:
            row_table: (request slots, context) int32, SGLang's `req_to_token`.
        """
        self._sinks, self._recent = args.sink_tokens, args.recent_tokens
        self._batch_invariant = args.enable_deterministic_inference
        self._shape = sketch_shape(heads.head_dim, args.sketch_bits)
        self.moments: list[KeyMoments] | None = None
        self.step_is_sparse = True
        self._row_table = row_table
        slots, context = row_table.shape
        new = row_table.new_zeros
        size = self._shape.bytes
        self.layers = heads.layers
        self._codes = codes
        self._sketches = [
            Sketch(
                new((1, heads.kv_heads, self._shape.channels, heads.head_dim), dtype=torch.float32),
                new((1, heads.kv_heads, self._shape.channels), dtype=torch.float32),
                new((1, heads.kv_heads, 4 * size, heads.head_dim), dtype=torch.float32),
            )
            for _ in range(heads.layers)
        ]
        self.sparse_from = new(slots).fill_(NEVER)
        at_once = min(REQUESTS_AT_ONCE, slots)
        self._scratch = row_scratch(
            at_once, heads.query_heads, heads.kv_heads, context, self._codes[0]
        )
        self.curve = args.budget_curve
        self._budgets = new(0)

    @property
    def least_length(self) -> int:
        """Requests that are sparse have at least so many tokens."""
        return self._sinks + self._recent + 1

    @property
    def sketch_bytes(self) -> int:
        return self._codes.numel()

    def attended(self, length: int) -> int:
        """How many tokens a KV head of a sparse request of this length attends to."""
        return min(length, self._sinks + self.curve.at(length) + self._recent)

    def load_basis(self, layer: int, basis: Tensor, mean: Tensor) -> None:
        """Take over the directions of a layer's keys: (Hkv, D, D) and (Hkv, D), see KeyBasis.

        The maps stay where they are, since captured graphs read them.
        """
        made = make_sketch(basis.unsqueeze(0), mean.unsqueeze(0), self._shape)
        for own, part in zip(self._sketches[layer], made, strict=True):
            own.copy_(part)

    def encode(self, layer: int, keys: Tensor, rows: Tensor) -> None:
        """Encode keys, (n, Hkv, D), that are written to pool rows, (n,)."""
        encode_rows(keys, rows, self._sketches[layer], self._shape, self._codes[layer])

    def encode_pool_rows(self, keys: Sequence[Tensor], rows: Tensor) -> None:
        """Encode keys that lie in pool rows, (n,) int64, as their prefill would have.

        Args:
            keys: (pool rows, Hkv, D) of all layers, dense ones among them.
        """
        for layer, buffer in enumerate(keys[len(keys) - self.layers :]):
            self.encode(layer, buffer.index_select(0, rows), rows)

    def begin_step(self, lengths: Tensor) -> None:
        """Set the budgets of a decode step, (B,) lengths, current tokens included.

        In a captured graph this is part of it.
        """
        self._budgets = self.curve.of(lengths)

    def select(
        self, layer: int, queries: Tensor, slots: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """Select for the sparse requests of a decode step; their current tokens are not read.

        The step has begun by `begin_step`.

        Args:
            queries: (B, Hq, D).
            slots: (B,) request slots.
            lengths: (B,) tokens of each request, the current one included.
            scale: factor on the logits.

        Returns:
            (B, Hkv, tokens) int32, rows of the pool; see `select_rows`.
        """
        heads = self._codes.shape[2]
        width = self._sinks + self.curve.most + self._recent
        picked = slots.new_empty((len(queries), heads, width), dtype=torch.int32)
        for start in range(0, len(queries), REQUESTS_AT_ONCE):
            part = slice(start, start + REQUESTS_AT_ONCE)
            select_rows(
                queries[part],
                self._codes[layer],
                self._sketches[layer],
                self._shape,
                self._row_table,
                slots[part],
                lengths[part],
                self.sparse_from,
                self._budgets[part],
                scale,
                self._sinks,
                self._recent,
                self._scratch,
                picked[part],
            )
        return picked

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        picked: Tensor,
        slots: Tensor,
        lengths: Tensor,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """Attend to what `select` has picked of sparse requests, and to all tokens of others.

        Args:
            queries: (B, Hq, D).
            keys, values: (pool rows, Hkv, D), which have the current tokens.
            picked, slots, lengths, scale: as for `select`.
            k_scale, v_scale: factors on the keys and values of an FP8 pool.

        Returns:
            (B, Hq, D).
        """
        out = torch.empty_like(queries)
        of_step = self._row_table, slots, lengths, self.sparse_from, self._budgets
        attend_rows(
            queries,
            keys,
            values,
            picked,
            *of_step,
            always=self._sinks + self._recent,
            scale=scale,
            out=out,
            k_scale=k_scale,
            v_scale=v_scale,
            batch_invariant=self._batch_invariant,
        )
        return out


def make_codes(args: CacheRankFlags, heads: Heads, rows: int, device: torch.device) -> Tensor:
    """Make room for the sketches of pool rows: (layers, rows, Hkv, bytes) uint8."""
    size = sketch_shape(heads.head_dim, args.sketch_bits).bytes
    return torch.empty((heads.layers, rows, heads.kv_heads, size), dtype=torch.uint8, device=device)


def bytes_beside_sketches(
    args: CacheRankFlags, available: int, layers: int, dtype: torch.dtype, model: Any
) -> int:
    """Share the memory of SGLang's KV pool between K and V and what selection takes.

    Args:
        available: bytes of both.
        layers: of the pool, dense ones among them.

    Raises:
        UnsupportedError: nothing is left for them.
    """
    kv_heads = model.get_num_kv_heads(args.tp_size)
    group = model.num_attention_heads // args.tp_size // kv_heads
    size = sketch_shape(model.head_dim, args.sketch_bits).bytes
    token = 2 * layers * kv_heads * model.head_dim * dtype.itemsize
    sketches = (layers - args.dense_layers) * kv_heads * size
    maps = 4 * (layers - args.dense_layers) * kv_heads * 8 * size * model.head_dim
    padded = 1 << (group - 1).bit_length()
    # Of a token: logits, a key, and its share of marks, of tops and of sums, rounded up.
    token_scratch = padded + 1 + (1 + padded // 4)
    scratch = REQUESTS_AT_ONCE * kv_heads * model.context_len * token_scratch
    if maps + scratch >= available:
        raise UnsupportedError(
            f"--context-length {model.context_len}: selection would take "
            f"{(maps + scratch) / 1e9:.1f} of the {available / 1e9:.1f} GB that SGLang's pool has. "
            "Lower it."
        )
    return (available - maps - scratch) * token // (token + sketches)


def heads_of(runner: Any, dense_layers: int) -> Heads:
    """Read the heads off a loaded model, as far as layers may be sparse.

    Raises:
        ValueError: its attention layers are not those of SGLang's KV pool, or not plain ones.
    """
    attention = attention_layers(runner)
    first = attention[0]
    if any(part.logit_cap or part.xai_temperature_len > 0 for part in attention):
        raise ValueError("the model caps logits of attention, which inline selection does not")
    layers = len(attention) - dense_layers
    return Heads(layers, first.tp_q_head_num, first.tp_k_head_num, first.qk_head_dim)
