"""Checksum of the slots of a working set: the specification, and all there is.

Both ranks compute it from their copies, which must agree bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32}
"""The integer dtype that has the bits of a float of so many bytes."""

_STRIDE, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd 62-bit constants spread the index of an element over all bits of its weight."""


def slots_checksum(keys: Tensor, values: Tensor) -> int:
    """Sum all bits, weighted so that swapping slots, heads, layers or K with V changes it.

    Args:
        keys, values: (L, Hkv, n, D), the filled slots in slot order, of a float dtype of 16 or 32
            bits.

    Returns:
        A non-negative integer below 2^63.
    """
    total = 0
    for is_value, tensor in enumerate((keys, values)):
        bits = tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()]).to(torch.int64)
        index = torch.arange(1, bits.numel() + 1, device=bits.device) * _STRIDE + is_value
        weight = (index ^ (index >> 29)) * _MIX  # wraps around, on purpose
        total += int((bits * weight.view(bits.shape)).sum())
    return total & ((1 << 63) - 1)
