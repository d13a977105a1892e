"""Packed 4-bit codes, plain torch: the specification.

Two neighbouring channels of a token share a byte, the even one in the low nibble, so that the codes
of one token are contiguous and can be read alone. Signed codes are in two's complement.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes.

    Args:
        codes: (..., D) integers in [-8, 15]; D is even.

    Returns:
        (..., D / 2) uint8.
    """
    low, high = (codes.to(torch.int16) & 15).unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor, signed: bool) -> Tensor:
    """Unpack codes: (..., D / 2) uint8 to (..., D) int16 in [0, 15], or [-8, 7] if signed."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int16)
    return (codes ^ 8) - 8 if signed else codes
