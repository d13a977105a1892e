"""QuantSpec codes: their ranges, the error of decoding them, and that only the tokens matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantization_cases import tokens
from torch import Tensor

from cache_rank.kernels.nibbles.reference import unpack, unpack_signed
from cache_rank.kernels.quantspec.reference import (
    GROUP,
    decode,
    encode,
)

groups = tokens((1, 40, GROUP))
KEYS, VALUES = -2, -1
SINGLE = torch.finfo(torch.float32)


@given(group=groups, dim=st.sampled_from((KEYS, VALUES)))
def test_decoding_is_within_a_step(group: Tensor, dim: int) -> None:
    codes = encode(group, dim)
    scale = codes.scale.double()
    slack = 4 * SINGLE.eps * (codes.zero.abs().double() + 16 * scale) + SINGLE.smallest_normal
    for bits, step in ((4, scale / 2), (8, scale / 16)):
        decoded = decode(codes, bits)
        assert decoded.dtype == torch.float32
        assert decoded.shape == group.shape
        assert ((group.double() - decoded.double()).abs() <= step + slack).all()
    # The lower nibble cannot round up to 8, so only there is the error above half its step.
    lower = unpack_signed(codes.lower)
    error = (group.double() - decode(codes).double()).abs()
    assert (error <= torch.where(lower == 7, scale / 16, scale / 32) + slack).all()


@pytest.mark.parametrize("dim", [KEYS, VALUES], ids=["keys", "values"])
def test_codes_are_those_of_the_formula(dim: int) -> None:
    group = torch.randn(GROUP, 32, generator=torch.Generator().manual_seed(2)).double()
    codes = encode(group.float(), dim)
    smallest = group.amin(dim, keepdim=True)
    scale = (group.amax(dim, keepdim=True) - smallest) / 15
    exact_upper = (group - smallest) / scale
    upper = unpack(codes.upper, 4)
    lower = unpack_signed(codes.lower)
    exact_lower = (exact_upper - upper) * 16
    for read, exact, bounds in ((upper, exact_upper, (0, 15)), (lower, exact_lower, (-8, 7))):
        clear = (exact % 1 - 0.5).abs() > 1e-3  # not a tie, but for float32
        assert torch.equal(read[clear].double(), exact.round().clamp(*bounds)[clear])
        assert (read.min(), read.max()) == bounds
        assert clear.float().mean() > 0.99
