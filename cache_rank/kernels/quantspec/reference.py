"""Hierarchical 4-bit + 4-bit quantization (QuantSpec sections 4.2-4.3, Appendix D): specification.

Keys are quantized per channel along a group of 128 tokens, and values per token along the head
dimension. Both are quantized asymmetrically into an upper nibble, and the error of that
symmetrically into a lower one:

    S = (max - min) / 15,  Z = min
    upper = clip(round((x - Z) / S), 0, 15)
    lower = clip(round((x - Z - S upper) / (S / 16)), -8, 7)
    4 bit:  S upper + Z            8 bit:  S upper + (S / 16) lower + Z

S and Z are stored in the dtype of the elements, where Z is exact. Rounding is half to even.

All of it is single float32 operations in a fixed order, so that codes are the same bits on every
device, and however many groups are encoded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.coded.reference import Plane, quotient
from cache_rank.kernels.nibbles.reference import pack, unpack, unpack_signed

GROUP = 128
"""This many tokens are quantized together; at least as many newest ones stay in full precision."""


class QuantSpecCodes(NamedTuple):
    """Codes of tokens, and the numbers that they are relative to.

    Attributes:
        upper: (..., n, D / 2) uint8 packed nibbles.
        lower: (..., n, D / 2) uint8 packed signed nibbles.
        scale: S in the dtype of the tokens: (..., 1, D) of a group of keys, (..., n, 1) of values.
        zero: Z, with the shape and dtype of S.
    """

    upper: Tensor
    lower: Tensor
    scale: Tensor
    zero: Tensor


def encode(tokens: Tensor, dim: int) -> QuantSpecCodes:
    """Quantize complete groups of keys per channel, or values per token.

    Args:
        tokens: (..., GROUP, D), any float dtype. Another number of tokens is one group too.
        dim: -2 for keys, which share a scale and a zero, (..., 1, D); -1 for values, (..., n, 1).

    Returns:
        Codes. Tokens that are not finite, or span more than float32, leave a scale that is not.
    """
    exact = tokens.float()
    zero = exact.amin(dim=dim, keepdim=True)
    span = exact.amax(dim=dim, keepdim=True) - zero
    # Divided by a tensor: by a number, torch on a GPU multiplies with its inverse.
    stored = (span / torch.full_like(span, 15)).to(tokens.dtype)
    scale = stored.float()  # rounded to what is stored before anything is taken relative to it
    offset = exact - zero
    upper = quotient(offset, scale).round().clamp(0, 15)
    lower = quotient(offset - scale * upper, scale / 16).round().clamp(-8, 7)
    return QuantSpecCodes(_pack(upper), _pack(lower), stored, zero.to(tokens.dtype))


def decode(codes: QuantSpecCodes, bits: int = 8) -> Tensor:
    """Decode keys or values.

    Args:
        codes: those of one group, or of any tokens with a scale and zero for each.
        bits: 4 reads the upper nibbles alone, and 8 reads both.

    Returns:
        (..., n, D) float32.
    """
    scale = codes.scale.float()
    offset = scale * unpack(codes.upper, 4)
    if bits == 8:
        offset = offset + scale / 16 * unpack_signed(codes.lower)
    return offset + codes.zero.float()


class QuantSpecCodec(NamedTuple):
    """The codec of keys, per channel, or of values, per token; see coded/reference.py.

    Attributes:
        per_channel: whether it encodes keys.
        dtype: the dtype of the tokens.
        read_bits: how many bits scores and attention read, 4 or 8.
    """

    per_channel: bool
    dtype: torch.dtype
    read_bits: int = 8

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """The tensors of `QuantSpecCodes`."""
        codes = Plane(GROUP, head_dim // 2, torch.uint8)
        relative_to = Plane(*((1, head_dim) if self.per_channel else (GROUP, 1)), self.dtype)
        return codes, codes, relative_to, relative_to

    def encode(self, tokens: Tensor) -> QuantSpecCodes:
        """Encode complete groups."""
        return encode(tokens, dim=-2 if self.per_channel else -1)

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        """Decode tokens from both nibbles."""
        return decode(QuantSpecCodes(*entries))

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float) -> Tensor:
        """Compute the logits of groups of keys."""
        keys = decode(QuantSpecCodes(*planes), self.read_bits)
        return (queries @ keys.transpose(-1, -2)) * scale

    def weigh(self, weights: Tensor, planes: Sequence[Tensor]) -> Tensor:
        """Add up the values of groups by their weights."""
        return weights @ decode(QuantSpecCodes(*planes), self.read_bits)


def _pack(codes: Tensor) -> Tensor:
    return pack(codes.nan_to_num(), 4)  # the scale tells that they mean nothing
