"""Rounding of tokens to 8 bits, float8_e4m3fn, plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


def round_to_fp8(tokens: Tensor) -> Tensor:
    """Round any float dtype to float8_e4m3fn: to the nearest number, half to even.

    What is beyond the range, infinities included, becomes the largest number. NaN stays NaN.
    """
    return tokens.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
