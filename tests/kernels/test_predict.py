"""Next-query prediction against the equations, solved one window at a time in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.predict import reference, triton
from cache_rank.kernels.predict.reference import (
    RIDGE_STRENGTH,
    PredictionMethod,
    predict_next_query,
)
from cache_rank.kernels.rotary.reference import align_to_next_position

IMPLEMENTATIONS = (reference, triton)
METHODS: tuple[PredictionMethod, ...] = ("last", "spade")
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


def naive_prediction(queries: Tensor, method: PredictionMethod) -> tuple[Tensor, float]:
    """Predict for one head from its valid queries (n + 1, D), newest first.

    In float64; with how far float32 may be from it (Euclidean norm).
    """
    queries = queries.double()
    newest, predecessors = queries[0], queries[1:]
    available, head_dim = predecessors.shape
    # Each output element is a sum of at most n + 1 products with weights that sum to about 1.
    rounding = 2 * (available + 2) * UNIT_ROUNDOFF * float(queries.norm())
    if method == "last" or available == 0:
        return newest, 0.0

    ridge = RIDGE_STRENGTH * float(predecessors.pow(2).sum()) / available
    total = torch.zeros_like(newest)
    error = 0.0
    for n in range(1, available + 1):
        window = predecessors[:n]
        gram = window @ window.T + ridge * torch.eye(n).double()
        if ridge == 0:
            solution, condition = torch.zeros(n).double(), 1.0
        else:
            solution = torch.linalg.solve(gram, window @ newest)
            condition = float(torch.linalg.cond(gram))
            assert condition <= (1 + available / RIDGE_STRENGTH) * (1 + 1e-9)
        weights = solution.softmax(-1)
        shifted = queries[:n]  # q_t, q_{t-1}, ...: one token newer than the window
        total += weights @ shifted
        # Normwise perturbation of a linear system: forming the Gram matrix and the right side
        # rounds sums of D products, and the factorization of n; independent roundings add up like
        # a square root, and the softmax does not amplify.
        relative = condition * (2 * head_dim**0.5 + 3 * n**0.5) * UNIT_ROUNDOFF
        size = float(solution.norm()) + float(newest.norm() / window.norm().clamp(min=1e-30))
        error += relative * size * float(shifted.norm())
    return total / available, error / available + rounding


CORRELATIONS = {"independent": 0.0, "drifting": 0.9, "almost constant": 0.9999}
"""How the queries of a head follow one another."""


def stream(correlation: float, *shape: int) -> Tensor:
    """(*shape), newest first along the dimension before the last."""
    noise = torch.randn(*shape)
    queries = noise.clone()
    for age in range(shape[-2] - 2, -1, -1):
        fresh = math.sqrt(1 - correlation**2) * noise[..., age, :]
        queries[..., age, :] = correlation * queries[..., age + 1, :] + fresh
    return queries


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("correlation", CORRELATIONS.values(), ids=CORRELATIONS)
@pytest.mark.parametrize(("count", "window"), [(2, 1), (1, 8), (2, 8), (3, 8), (9, 8)])
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_equations_in_float64(
    method: PredictionMethod, count: int, window: int, correlation: float
) -> None:
    queries = stream(correlation, 4, window + 1, 32)
    predicted = predict_next_query(queries, torch.tensor(count), method)
    assert predicted.dtype == torch.float32
    assert predicted.shape == (4, 32)
    for own, found in zip(queries, predicted, strict=True):
        expected, error = naive_prediction(own[:count], method)
        assert float((found.double() - expected).norm()) <= error


POISON = 7.0
FIRST_LAYER = 1


class Step(NamedTuple):
    """Rings of queries in which some rows of a step are, and where the rows are in them."""

    query_ring: Tensor
    slots: Tensor
    positions: Tensor
    counts: Tensor
    first_layer: int
    frequency: Tensor | None
    interleaved: bool

    def predicted_by(self, implementation: Any, method: PredictionMethod) -> Tensor:
        _, layers, query_heads, _, head_dim = self.query_ring.shape
        shape = (len(self.slots), layers - 2, query_heads, head_dim)
        out = torch.full(shape, POISON, device=self.query_ring.device)
        implementation.predict_step(*self, method, out)
        return out


def step_of(
    device: torch.device,
    counts: list[int],
    window: int = 4,
    head_dim: int = 16,
    layers: int = 1,
    query_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    rotary_dim: int = 0,
    interleaved: bool = False,
) -> Step:
    """Rows in the slots R - 1 .. 0, at positions that begin at any entry of the ring."""
    rows, ring = len(counts), window + 1
    shape = (rows + 1, layers + 2, query_heads, ring, head_dim)
    frequency = 100.0 ** -torch.linspace(0, 1, rotary_dim // 2)
    integers = {"dtype": torch.int32, "device": device}
    return Step(
        stream(CORRELATIONS["drifting"], *shape).to(device, dtype),
        torch.arange(rows - 1, -1, -1, **integers),
        torch.tensor([max(0, count - 1) + 3 * row for row, count in enumerate(counts)], **integers),
        torch.tensor(counts, **integers),
        FIRST_LAYER,
        frequency.to(device) if rotary_dim else None,
        interleaved,
    )


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Every predicted query, relative to the largest of its step."""
    error = (actual - expected).norm(dim=-1).amax()
    assert float(error) <= tolerance * float(expected.norm(dim=-1).amax())


@pytest.mark.parametrize("rotary_dim", [0, 16, 8])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_predicts_each_row_from_its_own_ring(
    method: PredictionMethod, rotary_dim: int
) -> None:
    step = step_of(torch.device("cpu"), [1, 2, 5, 4, 5], layers=2, rotary_dim=rotary_dim)
    step.slots[3] = -1
    predicted = step.predicted_by(reference, method)
    for row, (slot, position, count) in enumerate(
        zip(step.slots.tolist(), step.positions.tolist(), step.counts.tolist(), strict=True)
    ):
        if slot < 0:
            assert (predicted[row] == POISON).all()
            continue
        newest_first = [(position - age) % 5 for age in range(5)]
        queries = step.query_ring[slot, FIRST_LAYER : FIRST_LAYER + 2][:, :, newest_first]
        if step.frequency is not None:
            queries = align_to_next_position(queries, step.frequency, step.interleaved)
        expected = predict_next_query(queries, torch.tensor(count), method)
        # A batch of another size may be multiplied in another order.
        torch.testing.assert_close(predicted[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "counts", "shape"),
    [
        ("last", [1, 2], {"window": 1}),
        ("spade", [1, 2], {"window": 1, "query_heads": 1}),
        ("spade", [1, 2, 3], {"window": 2, "layers": 2}),
        ("last", [1, 2, 3, 4, 5], {"window": 4}),
        ("spade", [1, 2, 3, 4, 5], {"window": 4, "head_dim": 32, "query_heads": 1}),
        ("spade", [9, 17], {"window": 16, "query_heads": 1}),
        ("spade", [5, 3], {"rotary_dim": 16}),
        ("last", [5, 3], {"rotary_dim": 4, "interleaved": True}),
        ("last", [5, 3], {"head_dim": 32, "rotary_dim": 24}),
        ("spade", [5, 1], {"head_dim": 32, "rotary_dim": 24, "interleaved": True}),
        ("spade", [5, 3], {"head_dim": 64, "rotary_dim": 64, "interleaved": True}),
        ("last", [9, 4], {"window": 8, "rotary_dim": 16, "dtype": torch.float16}),
        ("spade", [9, 4], {"window": 8, "rotary_dim": 16, "dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_triton_equals_reference(
    device: torch.device, method: PredictionMethod, counts: list[int], shape: dict[str, Any]
) -> None:
    """A row in the middle is refused, and keeps what it holds."""
    step = step_of(device, counts, **shape)
    if len(counts) > 2:
        step.slots[1] = -1
    expected = step.predicted_by(reference, method)
    assert_close(step.predicted_by(triton, method), expected, 1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_triton_keeps_poisoned_and_invalid_entries_apart(
    device: torch.device, method: PredictionMethod
) -> None:
    step = step_of(device, [3, 5], layers=2, query_heads=3)
    expected = step.predicted_by(triton, method)
    # Row 0 is at position 2 in slot 1: entries 3 and 4 are of an earlier owner.
    step.query_ring[1, :, :, 3:] = math.nan
    step.query_ring[0, FIRST_LAYER, 1] = math.nan
    predicted = step.predicted_by(triton, method)
    assert torch.equal(predicted[0], expected[0])
    assert torch.equal(predicted[1, 1], expected[1, 1])
    assert torch.equal(predicted[1, 0, ::2], expected[1, 0, ::2])
    assert predicted[1, 0, 1].isnan().all()


def test_a_step_of_an_unknown_method_raises(device: torch.device, implementation: Any) -> None:
    with pytest.raises(ValueError, match="unknown query predictor 'median'"):
        step_of(device, [1]).predicted_by(implementation, "median")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "window", "rotary_dim", "dtype"),
    [
        ("last", 16, 0, torch.float32),
        ("last", 32, 64, torch.bfloat16),
        ("spade", 16, 128, torch.bfloat16),
        ("spade", 32, 0, torch.bfloat16),
        ("spade", 32, 64, torch.float32),
        ("spade", 16, 64, torch.bfloat16),
        ("spade", 32, 128, torch.float32),
    ],
    ids=str,
)
def test_triton_at_full_size(
    method: PredictionMethod, window: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    shape = {"head_dim": 128, "layers": 6, "query_heads": 32}
    counts = [window + 1] * 12 + [window, 3, 2, 1]
    device = torch.device("cuda")
    step = step_of(device, counts, window, **shape, dtype=dtype, rotary_dim=rotary_dim)
    assert_close(step.predicted_by(triton, method), step.predicted_by(reference, method), 1e-4)
