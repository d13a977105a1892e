"""Tokens in 8 bits, float8_e4m3fn, plain torch: the specification of how they are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_LARGEST = 448.0


def round_to_fp8(tokens: Tensor) -> Tensor:
    """To float8_e4m3fn: to the nearest, half to even; what is out of its range, infinities too, at
    its largest number. NaN stays NaN."""
    return tokens.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


def convert(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """To any float dtype; see `round_to_fp8` for float8_e4m3fn."""
    return round_to_fp8(tokens) if dtype == torch.float8_e4m3fn else tokens.to(dtype)
