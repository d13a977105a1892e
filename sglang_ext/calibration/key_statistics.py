"""Which directions of keys matter to queries that meet them; see kernels/sketch/reference.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FLOOR = 1e-4
"""Moments have at least this share of their mean in every direction: they are inverted."""


class KeyMoments:
    """Sums over tokens of one layer, by KV head, after rotary embedding.

    Attributes:
        keys: (Hkv, D) float64, Σ k.
        squares: (Hkv, D, D) float64, Σ k kᵀ.
        queries: (Hkv, D, D) float64, Σ q qᵀ over the query heads of each.
    """

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device) -> None:
        zeros = torch.zeros((kv_heads, head_dim, head_dim), dtype=torch.float64, device=device)
        self.tokens = 0
        self.keys, self.squares, self.queries = zeros[..., 0].clone(), zeros, zeros.clone()

    def add(self, queries: Tensor, keys: Tensor) -> None:
        """Add tokens: queries (T, Hq, D) and keys (T, Hkv, D)."""
        kv_heads, head_dim = keys.shape[1:]
        by_head = keys.transpose(0, 1).float()  # (Hkv, T, D)
        grouped = queries.view(len(queries), kv_heads, -1, head_dim).transpose(0, 1).float()
        grouped = grouped.reshape(kv_heads, -1, head_dim)
        self.tokens += len(keys)
        self.keys += by_head.sum(1)
        self.squares += by_head.mT @ by_head
        self.queries += grouped.mT @ grouped


class KeyBasis(NamedTuple):
    """What a sketch of a layer's keys is made of.

    Attributes:
        basis: (Hkv, D, D) float32, B.
        mean: (Hkv, D) float32, μ.
    """

    basis: Tensor
    mean: Tensor


def key_basis(moments: KeyMoments) -> KeyBasis:
    """Find the directions of a layer."""
    mean = moments.keys / moments.tokens
    spread = moments.squares / moments.tokens - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    root = _root(_floored(moments.queries / moments.tokens))
    variances, directions = torch.linalg.eigh(root @ _floored(spread) @ root)
    order = variances.flip(-1).sqrt().unsqueeze(-1)  # largest first
    return KeyBasis((directions.flip(-1).mT @ root / order).float(), mean.float())


def _floored(moment: Tensor) -> Tensor:
    size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-12)
    return moment + _FLOOR * size * torch.eye(moment.shape[-1]).to(moment)


def _root(moment: Tensor) -> Tensor:
    """The symmetric square root."""
    sizes, directions = torch.linalg.eigh(moment)
    return directions * sizes.clamp(min=0).sqrt().unsqueeze(-2) @ directions.mT
