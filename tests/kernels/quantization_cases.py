"""Keys and values that quantization has trouble with."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("normal", "offset", "constant", "outlier", "two values", "large", "tiny", "half zero")


@st.composite
def tokens(draw: st.DrawFn, sizes: tuple[int, ...]) -> Tensor:
    """(heads, n, D) of any float dtype, where each channel is of a kind of its own."""
    heads, count = draw(st.integers(1, 3)), draw(st.sampled_from(sizes))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    head_dim = draw(st.sampled_from((2, 8, 14, 64)))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    channels = [
        _channel(kinds[index % len(kinds)], (heads, count), generator) for index in range(head_dim)
    ]
    largest = torch.finfo(dtype).max / 2
    return torch.stack(channels, dim=-1).clamp(-largest, largest).to(dtype)


def _channel(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator)
    if kind == "offset":
        return normal + 50
    if kind == "constant":
        return torch.full(shape, float(normal[0, 0]))
    if kind == "outlier":
        return torch.where(torch.arange(shape[1]) == shape[1] // 3, normal * 1000, normal)
    if kind == "two values":
        return normal.sign()
    if kind == "half zero":
        return torch.where(normal > 0, normal, torch.zeros_like(normal))
    return normal * {"normal": 1.0, "large": 1e37, "tiny": 1e-40}[kind]


def normalized_error(exact: Tensor, decoded: Tensor) -> float:
    """E |x - decoded|² / E |x|² (vNMSE, Lynx section 6.2)."""
    return float((exact - decoded).square().sum() / exact.square().sum())
