"""How tokens are written into a message: the reference against arithmetic in whole numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.wire.reference import SHARED, from_wire, to_wire, wire_width

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INT8 = torch.int8


def written_by_loops(tokens: Tensor) -> Tensor:
    """(n, D): each block by itself, in numbers without rounding but the one that is meant."""
    rows = []
    for token in tokens.double().tolist():
        codes, exponents = [], []
        for first in range(0, len(token), SHARED):
            block = token[first : first + SHARED]
            largest = max(map(abs, block))
            power = max(math.frexp(largest)[1] - 1, -120) if largest else -120
            # Of the largest, the integer is from 64 to 127.
            codes += [max(-127, min(127, round(number * 2.0 ** (6 - power)))) for number in block]
            exponents.append(power + 127)
        rows.append([*codes, *(number - 256 * (number > 127) for number in exponents)])
    return torch.tensor(rows, dtype=torch.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_eight_channels_share_a_power_of_two(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = (scale * torch.randn((50, 64), generator=generator)).to(dtype)
    tokens[0], tokens[1, :SHARED], tokens[2, 3] = 0, 0, -0.0
    written = to_wire(tokens, INT8)
    assert written.shape == (50, wire_width(64, INT8)) == (50, 72)
    assert torch.equal(written, written_by_loops(tokens))


def test_what_is_halfway_goes_to_the_even_integer() -> None:
    tokens = torch.tensor([64, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.5])
    assert to_wire(tokens, INT8)[:8].tolist() == [64, 0, 2, 2, 0, -2, 126, -127]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_read_is_off_by_a_64th_of_the_largest_at_most(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn((200, 32), generator=generator).mul(2).exp().to(dtype)
    read = from_wire(to_wire(tokens, INT8), dtype)
    assert read.dtype == dtype
    # A power of two is at most the largest, and 64 steps; the integer 128 is read as 127.
    step = tokens.float().unflatten(-1, (-1, SHARED)).abs().amax(-1, keepdim=True) / 64
    off = (read.float() - tokens.float()).unflatten(-1, (-1, SHARED)).abs()
    rounding = torch.finfo(dtype).eps * tokens.float().abs().unflatten(-1, (-1, SHARED))
    assert (off <= step + rounding).all()
    assert off.mean() < step.mean() / 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_least_numbers_come_back_finite(dtype: torch.dtype) -> None:
    numbers = torch.finfo(dtype)
    tokens = torch.zeros((3, SHARED), dtype=dtype)
    tokens[0, 0], tokens[1, 1], tokens[2, 2] = numbers.max, numbers.min, numbers.smallest_normal
    read = from_wire(to_wire(tokens, INT8), dtype)
    assert read.isfinite().all()
    assert read[0, 0] >= 0.99 * numbers.max
    assert read[1, 1] <= 0.99 * numbers.min
    assert 0 <= read[2, 2] <= 2 * numbers.smallest_normal


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_none(broken: float) -> None:
    tokens = torch.ones(2, 2 * SHARED)
    tokens[0, SHARED + 3] = broken
    read = from_wire(to_wire(tokens, INT8), torch.float32)
    assert read[0, SHARED:].isnan().all()
    assert (read[0, :SHARED] == 1).all()
    assert (read[1] == 1).all()


def test_int8_wants_whole_blocks() -> None:
    assert wire_width(20, torch.bfloat16) == 20
    with pytest.raises(ValueError, match="8 channels share a scale in int8, and heads have 20"):
        wire_width(20, INT8)
