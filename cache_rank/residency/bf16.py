"""`bf16`: tokens as they came, in the pool's dtype. The reference for every other format."""

from __future__ import annotations

import torch
from cache_rank_kernels.score.reference import score_tokens
from torch import Tensor

from cache_rank.config import ModelShape

_FIRST_CAPACITY = 256
"""Tokens; the space grows by half, so that appending costs O(1) a token."""


class Bf16Residency:
    """K and V of one sequence as two (layers, Hkv, capacity, D) tensors."""

    def __init__(self, model: ModelShape, device: torch.device) -> None:
        shape = (model.layers, model.kv_heads, _FIRST_CAPACITY, model.head_dim)
        self._keys = torch.empty(shape, dtype=model.torch_dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self._lengths = [0] * model.layers

    @property
    def tokens(self) -> int:
        return self._lengths[-1]

    @property
    def bytes_held(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def append(self, layers: range, keys: Tensor, values: Tensor) -> None:
        start = self._lengths[layers.start]
        stop = start + keys.shape[1]
        self._reserve(stop)
        group = slice(layers.start, layers.stop)
        self._keys[group, :, start:stop] = keys.transpose(1, 2)
        self._values[group, :, start:stop] = values.transpose(1, 2)
        self._lengths[group] = [stop] * len(layers)

    def score(self, layers: range, queries: Tensor, scale: float) -> Tensor:
        tokens = self._lengths[layers.start]
        return score_tokens(queries, self._keys[layers.start : layers.stop, :, :tokens], scale)

    def gather(self, layers: range, positions: Tensor) -> tuple[Tensor, Tensor]:
        group = slice(layers.start, layers.stop)
        index = positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, self._keys.shape[-1])
        return self._keys[group].gather(2, index), self._values[group].gather(2, index)

    def _reserve(self, tokens: int) -> None:
        capacity = self._keys.shape[2]
        if tokens <= capacity:
            return
        grown = max(tokens, capacity + capacity // 2)
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_empty((*old.shape[:2], grown, old.shape[3]))
            new[:, :, :capacity] = old
            setattr(self, name, new)
