"""Forecast queries: the reference against the equation in float64, Triton against the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.forecast import reference, triton

POISON = 7.0


class Step(NamedTuple):
    """The hidden states of a step, and by what the queries of a group are forecast."""

    hidden: Tensor
    projections: Tensor
    constants: Tensor
    query_norms: Tensor | None
    positions: Tensor
    slots: Tensor
    frequency: Tensor | None
    interleaved: bool
    scale: float = 1.25
    norm_epsilon: float = 1e-5
    query_norm_epsilon: float = 1e-6

    def forecast(self, implementation: Any) -> Tensor:
        shape = (len(self.slots), *self.constants.shape)
        out = torch.full(shape, POISON, device=self.slots.device)
        workspace = implementation.forecast_workspace(*shape, self.slots.device)
        implementation.forecast_step(*self, workspace, out)
        return out

    def expected(self, row: int, layer: int, head: int) -> Tensor:
        """The equation, in float64: (D,)."""
        state = self.hidden[row].double()
        state = state / (state.pow(2).mean() + self.norm_epsilon).sqrt()
        query = state @ self.projections[layer, head].double()
        query = query + self.constants[layer, head].double()
        if self.query_norms is not None:
            query = query / (query.pow(2).mean() + self.query_norm_epsilon).sqrt()
            query = query * self.query_norms[layer, head].double()
        if self.frequency is None:
            return query
        pairs, rotated = len(self.frequency), query.clone()
        for pair, frequency in enumerate(self.frequency.double()):
            places = (2 * pair, 2 * pair + 1) if self.interleaved else (pair, pair + pairs)
            turned = torch.complex(query[places[0]], query[places[1]]) * torch.polar(
                torch.tensor(self.scale).double(), frequency * int(self.positions[row])
            )
            rotated[places[0]], rotated[places[1]] = turned.real, turned.imag
        return rotated


def step_of(
    slots: list[int],
    layers: int = 2,
    heads: int = 3,
    head_dim: int = 16,
    width: int = 40,
    dtype: torch.dtype = torch.float32,
    pairs: int | None = 8,
    interleaved: bool = False,
    has_query_norm: bool = True,
    device: torch.device | str = "cpu",
) -> Step:
    """Random states; as in a message, a row is a part of a longer one."""
    generator = torch.Generator().manual_seed(len(slots) + head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return Step(
        (30 * random(len(slots), width + 8))[:, :width],
        random(layers, heads, width, head_dim),
        random(layers, heads, head_dim),
        random(layers, heads, head_dim) if has_query_norm else None,
        torch.arange(len(slots), dtype=torch.int32, device=device) * 32_100 + 7,
        torch.tensor(slots, dtype=torch.int32, device=device),
        10_000.0 ** -(torch.arange(pairs, device=device) / pairs) if pairs else None,
        interleaved,
    )


KINDS = [
    {"pairs": 8, "interleaved": False, "has_query_norm": True},
    {"pairs": 8, "interleaved": True, "has_query_norm": False},
    {"pairs": 4, "interleaved": False, "has_query_norm": False},
    {"pairs": 4, "interleaved": True, "has_query_norm": True},
    {"pairs": None, "interleaved": False, "has_query_norm": True},
]
"""All elements rotate, some, or none; as halves, or interleaved."""


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_reference_is_the_equation(kind: dict[str, Any]) -> None:
    step = step_of([2, -1, 0], **kind)
    found = step.forecast(reference)
    for row in (0, 2):
        for layer in range(2):
            for head in range(3):
                expected = step.expected(row, layer, head).float()
                torch.testing.assert_close(found[row, layer, head], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("slots", "shape"),
    [
        *(([2, -1, 0], kind) for kind in KINDS),
        ([0], {"layers": 1, "heads": 1, "width": 16, "dtype": torch.float16}),
        ([-1], {"head_dim": 32, "pairs": 16, "dtype": torch.bfloat16}),
        ([5, 1, 0, 3, -1, 2], {"layers": 3, "head_dim": 64, "width": 129, "pairs": 32}),
        ([0, 1], {"head_dim": 128, "width": 600, "pairs": 64, "dtype": torch.bfloat16}),
        ([*range(19)], {"head_dim": 8, "width": 24, "pairs": 4, "dtype": torch.float16}),
    ],
    ids=str,
)
def test_triton_equals_the_reference(
    device: torch.device, slots: list[int], shape: dict[str, Any]
) -> None:
    step = step_of(slots, device=device, **shape)
    found, expected = step.forecast(triton), step.forecast(reference)
    live = step.slots >= 0
    # Products are summed up in another order.
    torch.testing.assert_close(found[live], expected[live], rtol=2e-3, atol=2e-3)
    assert (found[~live] == POISON).all()


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    together = step_of([*range(18)], 1, 2, 64, 200, torch.bfloat16, 32, device=device)
    expected = together.forecast(triton)
    for row in (0, 15, 17):
        one = slice(row, row + 1)
        alone = together._replace(
            hidden=together.hidden[one],
            positions=together.positions[one].clone(),
            slots=together.slots[:1],
        )
        assert torch.equal(alone.forecast(triton)[0], expected[row])
