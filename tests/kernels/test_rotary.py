"""Rotary alignment against complex numbers in float64: undo each rotation, rotate to t + 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.rotary.reference import align_to_next_position

UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class Rotary:
    name: str
    head_dim: int
    rotary_dim: int
    interleaved: bool

    @property
    def frequency(self) -> Tensor:
        exponent = torch.arange(0, self.rotary_dim, 2) / max(self.rotary_dim, 1)
        return 10_000.0**-exponent


CASES = (
    Rotary("halves", 16, 16, False),
    Rotary("interleaved", 16, 16, True),
    Rotary("halves-partial", 20, 8, False),
    Rotary("interleaved-partial", 20, 8, True),
    Rotary("one-pair", 2, 2, False),
    Rotary("nothing-rotates", 6, 0, False),
)


def rotate(queries: Tensor, positions: Tensor, case: Rotary) -> Tensor:
    """Rotate float64 queries (..., n, D) to positions (n,), pair by pair, as complex numbers."""
    half = case.rotary_dim // 2
    pairs = [(2 * i, 2 * i + 1) if case.interleaved else (i, i + half) for i in range(half)]
    rotated = queries.clone()
    for (real, imaginary), frequency in zip(pairs, case.frequency.double(), strict=True):
        number = torch.complex(queries[..., real], queries[..., imaginary])
        turned = number * torch.polar(torch.ones(()).double(), positions * frequency)
        rotated[..., real], rotated[..., imaginary] = turned.real, turned.imag
    return rotated


def tolerance(queries: Tensor) -> Tensor:
    """The angle rounds to half an ulp of its size; products and sums round a few times more."""
    largest_angle = queries.shape[-2]  # the first frequency is 1
    return (largest_angle + 6) * UNIT_ROUNDOFF * math.sqrt(2) * queries.abs().amax()


@pytest.mark.parametrize("position", [16, 100_000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_undoing_each_rotation_and_rotating_to_the_next_position(
    case: Rotary, position: int
) -> None:
    torch.manual_seed(0)
    queries = torch.randn(2, 3, 17, case.head_dim)
    own = torch.arange(position, position - 17, -1).double()
    unrotated = rotate(queries.double(), -own, case)
    expected = rotate(unrotated, torch.full_like(own, position + 1), case)
    aligned = align_to_next_position(queries, case.frequency, case.interleaved)
    assert aligned.dtype == torch.float32
    assert (aligned - expected).abs().max() <= tolerance(queries)


def test_bfloat16_queries_are_rotated_in_float32() -> None:
    case = CASES[0]
    queries = torch.randn(5, case.head_dim).bfloat16()
    aligned = align_to_next_position(queries, case.frequency, case.interleaved)
    expected = align_to_next_position(queries.float(), case.frequency, case.interleaved)
    assert torch.equal(aligned, expected)
