"""Checksum of a working set's slots: both ranks compute it, and it must agree bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32}


def slots_checksum(keys: Tensor, values: Tensor) -> int:
    """Sum of all bits, weighted so that swapping slots, heads, layers or K with V changes it.

    Args:
        keys, values: (L, Hkv, n, D), contents of the filled slots in slot order, 16 or 32 bit.

    Returns:
        A non-negative integer below 2^63.
    """
    total = 0
    for part, tensor in enumerate((keys, values), start=1):
        bits = tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()]).to(torch.int64)
        weight = torch.arange(1, bits.numel() + 1, device=bits.device).view(bits.shape)
        total += part * int((bits * weight).sum())
    return total & ((1 << 63) - 1)
