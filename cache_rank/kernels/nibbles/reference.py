"""Packed codes of 4 bits and less, plain torch: the specification.

Channels that lie D · bits / 8 apart share a byte, and the first of them has the lowest bits. So the
codes of one token are contiguous and can be read alone, and a mask and a shift unpack a stretch of
channels in order. Signed codes are in two's complement.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes.

    Args:
        codes: (..., D) integers of `bits` bits, signed or not; D is a multiple of 8 / bits.
        bits: 1, 2, 4 or 8.

    Returns:
        (..., D · bits / 8) uint8.
    """
    width = codes.shape[-1] * bits // 8
    packed = codes.new_zeros((*codes.shape[:-1], width), dtype=torch.uint8)
    for index in range(8 // bits):
        part = codes[..., index * width : (index + 1) * width].to(torch.int16)
        packed |= ((part & (1 << bits) - 1) << index * bits).to(torch.uint8)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes that are not signed: (..., D · bits / 8) uint8 to (..., D) uint8."""
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.cat(parts, dim=-1)


def unpack_signed(packed: Tensor) -> Tensor:
    """Unpack signed codes of 4 bits: (..., D / 2) uint8 to (..., D) int16 in [-8, 7]."""
    return (unpack(packed, 4).to(torch.int16) ^ 8) - 8
