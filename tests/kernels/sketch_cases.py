"""Sketches with random maps, and keys that lie in bit planes."""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.kernels.sketch.reference import Sketch, SketchShape, make_sketch, sketch_shape


def random_sketch(
    layers: int, kv_heads: int, head_dim: int, bits: int, device: torch.device
) -> tuple[Sketch, SketchShape]:
    torch.manual_seed(0)
    basis = torch.eye(head_dim) + 0.05 * torch.randn(layers, kv_heads, head_dim, head_dim)
    mean = torch.randn(layers, kv_heads, head_dim)
    shape = sketch_shape(head_dim, bits)
    return Sketch(*(part.to(device) for part in make_sketch(basis, mean, shape))), shape


def keys_of(planes: Tensor) -> Tensor:
    """The keys of tokens, (units, tokens), of their bit planes; see `RowScratch`."""
    bits = planes.long().unsqueeze(-1) >> torch.arange(8, device=planes.device) & 1
    plane = torch.arange(8, device=planes.device)[:, None, None]
    return (bits << plane).sum(dim=1).flatten(1)
