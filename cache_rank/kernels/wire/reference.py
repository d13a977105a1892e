"""How tokens are written into a message and read from it, plain torch: the specification.

In the dtype of the KV pool as they are, or in int8, where 8 channels share a power of two: their
integers are of 7 bits and a sign, and a byte more is for each 8. That is MXINT8 of the OCP
Microscaling Formats (MX) Specification, section 5.3, in blocks of 8 and not of 32: what one thread
of a GPU reads at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHARED = 8
"""So many channels share a power of two."""

LARGEST = 127
"""The largest integer; the least is its negative."""

_EXPONENT_OF_ONE = 127 + 6
"""A block's exponent is that of its largest number in float32, whose bias is 127; the integer of
that number is from 64 to 127, so that 6 bits follow its first."""

_LEAST_EXPONENT = 7
"""By a lesser one a factor would be out of range, and tokens are 0."""

_NOT_FINITE = 255
"""The exponent of a block in which a number is not finite."""


def wire_width(head_dim: int, dtype: torch.dtype) -> int:
    """How many elements of a message's dtype a key or a value takes.

    Raises:
        ValueError: the dtype is int8, and blocks of 8 channels do not make up D.
    """
    if dtype != torch.int8:
        return head_dim
    if head_dim % SHARED:
        raise ValueError(f"{SHARED} channels share a scale in int8, and heads have {head_dim}")
    return head_dim + head_dim // SHARED


def to_wire(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Write tokens in the dtype of a message.

    Args:
        tokens: (..., D) in any float dtype.
        dtype: a float dtype, or int8.

    Returns:
        (..., width) of that dtype, see `wire_width`: what `from_wire` reads. In int8 the integers
        come first, rounded to the nearest, half to even, and then the blocks' exponents. Those of a
        block in which a number is not finite are 0, and its exponent is 255.
    """
    if dtype != torch.int8:
        return tokens.to(dtype)
    blocks = tokens.float().unflatten(-1, (-1, SHARED))
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF
    exponent = (magnitude.amax(-1) >> 23).clamp(min=_LEAST_EXPONENT)
    factor = torch.ldexp(torch.ones_like(blocks[..., 0]), _EXPONENT_OF_ONE - exponent)
    scaled = blocks * factor.unsqueeze(-1)
    scaled = torch.where(exponent.unsqueeze(-1) == _NOT_FINITE, 0, scaled)
    codes = scaled.round().clamp(-LARGEST, LARGEST).to(torch.int8).flatten(-2)
    return torch.cat([codes, exponent.to(torch.uint8).view(torch.int8)], dim=-1)


def from_wire(written: Tensor, dtype: torch.dtype) -> Tensor:
    """Read tokens that `to_wire` has written, (..., D) in a float dtype.

    All of a block in which a number was not finite is NaN.
    """
    if written.dtype != torch.int8:
        return written.to(dtype)
    blocks = written.shape[-1] // (SHARED + 1)
    codes, exponent = written.split([blocks * SHARED, blocks], dim=-1)
    exponent = exponent.contiguous().view(torch.uint8).to(torch.int32)
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - _EXPONENT_OF_ONE)
    scale = torch.where(exponent == _NOT_FINITE, torch.nan, scale)
    return (codes.unflatten(-1, (-1, SHARED)) * scale.unsqueeze(-1)).flatten(-2).to(dtype)
