"""Packed 4-bit codes, plain torch: the specification.

Channels i and i + D / 2 of a token share a byte, and channel i has the low nibble. So the codes of
one token are contiguous and can be read alone, and a mask or a shift unpacks half of its channels
in order. Signed codes are in two's complement.
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
    low, high = (codes.to(torch.int16) & 15).chunk(2, dim=-1)
    return (low | high << 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor, signed: bool) -> Tensor:
    """Unpack codes: (..., D / 2) uint8 to (..., D) int16 in [0, 15], or [-8, 7] if signed."""
    codes = torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.int16)
    return (codes ^ 8) - 8 if signed else codes
