"""Next-query prediction against the equations, solved one window at a time in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from cache_rank_kernels.predict.reference import (
    EMA_DECAY,
    RIDGE_STRENGTH,
    PredictionMethod,
    predict_next_query,
)
from torch import Tensor

METHODS: tuple[PredictionMethod, ...] = ("last", "ema", "spade", "ridge")
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class Expected:
    """A prediction in float64, and how far float32 may be from it (Euclidean norm)."""

    query: Tensor
    error: float


def naive_prediction(queries: Tensor, method: PredictionMethod) -> Expected:
    """Predict for one head from its valid queries (n + 1, D), newest first."""
    queries = queries.double()
    newest, predecessors = queries[0], queries[1:]
    available, head_dim = predecessors.shape
    # Each output element is a sum of at most n + 1 products with weights that sum to about 1.
    rounding = 2 * (available + 2) * UNIT_ROUNDOFF * float(queries.norm())
    if method == "last" or available == 0:
        return Expected(newest, 0.0)
    if method == "ema":
        weights = torch.tensor([EMA_DECAY**age for age in range(available + 1)]).double()
        return Expected(weights / weights.sum() @ queries, rounding)

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
        weights = solution.softmax(-1) if method == "spade" else solution
        shifted = queries[:n]  # q_t, q_{t-1}, ...: one token newer than the window
        total += weights @ shifted
        # Normwise perturbation of a linear system: forming the Gram matrix and the right side
        # rounds sums of D products, and the factorization of n; independent roundings add up like
        # a square root, and the softmax does not amplify.
        relative = condition * (2 * head_dim**0.5 + 3 * n**0.5) * UNIT_ROUNDOFF
        size = float(solution.norm()) + float(newest.norm() / window.norm().clamp(min=1e-30))
        error += relative * size * float(shifted.norm())
    return Expected(total / available, error / available + rounding)


def assert_predicts(queries: Tensor, count: int, method: PredictionMethod, actual: Tensor) -> None:
    expected = naive_prediction(queries[:count], method)
    assert float((actual.double() - expected.query).norm()) <= expected.error


@dataclass(frozen=True)
class Stream:
    """How the queries of a head follow one another."""

    name: str
    correlation: float

    def sample(self, *shape: int) -> Tensor:
        """(*shape), newest first along the dimension before the last."""
        noise = torch.randn(*shape)
        queries = noise.clone()
        for age in range(shape[-2] - 2, -1, -1):
            fresh = math.sqrt(1 - self.correlation**2) * noise[..., age, :]
            queries[..., age, :] = self.correlation * queries[..., age + 1, :] + fresh
        return queries


STREAMS = (Stream("independent", 0.0), Stream("drifting", 0.9), Stream("almost-constant", 0.9999))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_equations_in_float64(
    method: PredictionMethod, count: int, stream: Stream
) -> None:
    queries = stream.sample(4, 9, 32)  # W = 8
    predicted = predict_next_query(queries, torch.tensor(count), method)
    assert predicted.dtype == torch.float32
    assert predicted.shape == (4, 32)
    for head in range(4):
        assert_predicts(queries[head], count, method, predicted[head])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_equations_at_any_head_norm(method: PredictionMethod, scale: float) -> None:
    queries = scale * STREAMS[1].sample(17, 64)
    predicted = predict_next_query(queries, torch.tensor(17), method)
    assert_predicts(queries, 17, method, predicted)


@pytest.mark.parametrize("method", METHODS)
def test_a_window_of_one_predecessor(method: PredictionMethod) -> None:
    queries = torch.randn(2, 16)
    predicted = predict_next_query(queries, torch.tensor(2), method)
    assert_predicts(queries, 2, method, predicted)


@pytest.mark.parametrize("method", METHODS)
def test_a_single_query_is_repeated(method: PredictionMethod) -> None:
    queries = torch.randn(3, 9, 16)
    predicted = predict_next_query(queries, torch.tensor(1), method)
    assert torch.equal(predicted, queries[:, 0])


@pytest.mark.parametrize("garbage", [1e6, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_entries_beyond_the_count_are_ignored(method: PredictionMethod, garbage: float) -> None:
    queries = torch.randn(9, 16)
    padded = queries.clone()
    padded[5:] = garbage
    count = torch.tensor(5)
    assert torch.equal(
        predict_next_query(padded, count, method), predict_next_query(queries, count, method)
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_head_of_a_batch_is_predicted_as_if_alone(method: PredictionMethod) -> None:
    queries = torch.randn(3, 2, 5, 9, 16)
    counts = torch.tensor([1, 4, 9]).view(3, 1, 1)
    predicted = predict_next_query(queries, counts, method)
    assert predicted.shape == (3, 2, 5, 16)
    for row in range(3):
        alone = predict_next_query(queries[row], counts[row], method)
        assert torch.equal(predicted[row], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_narrow_queries_are_computed_in_float32(
    method: PredictionMethod, dtype: torch.dtype
) -> None:
    queries = torch.randn(2, 9, 16).to(dtype)
    count = torch.tensor(9)
    predicted = predict_next_query(queries, count, method)
    assert torch.equal(predicted, predict_next_query(queries.float(), count, method))


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("method", METHODS)
def test_zero_queries_predict_zero(method: PredictionMethod, count: int) -> None:
    predicted = predict_next_query(torch.zeros(2, 9, 16), torch.tensor(count), method)
    assert torch.equal(predicted, torch.zeros(2, 16))


@pytest.mark.parametrize("zero", ["newest", "predecessors"])
@pytest.mark.parametrize("method", METHODS)
def test_zero_newest_query_or_zero_predecessors(method: PredictionMethod, zero: str) -> None:
    queries = torch.randn(9, 16)
    if zero == "newest":
        queries[0] = 0
    else:
        queries[1:] = 0
    assert_predicts(queries, 9, method, predict_next_query(queries, torch.tensor(9), method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30], ids=str)
def test_a_poisoned_head_leaves_the_others_alone(method: PredictionMethod, poison: float) -> None:
    """1e30 is finite and its square is not."""
    queries = torch.randn(4, 9, 16)
    expected = predict_next_query(queries, torch.tensor(9), method)
    poisoned = queries.clone()
    poisoned[2, 3, 5] = poison
    predicted = predict_next_query(poisoned, torch.tensor(9), method)
    others = [0, 1, 3]
    assert torch.equal(predicted[others], expected[others])


@pytest.mark.parametrize("growth", [1.0, 1.05, -1.1], ids=str)
def test_ridge_continues_a_geometric_sequence(growth: float) -> None:
    """q_{t+1} = r q_t: the window of n is right up to a factor trace(n) / (trace(n) + eps).

    With |r| >= 1 the newest predecessors have at least the mean squared norm, so window n falls
    short by at most strength / n, and the mean over n leaves room for rounding below the strength.
    """
    first = torch.randn(32)
    queries = torch.stack([first * growth**t for t in range(8, -1, -1)])
    predicted = predict_next_query(queries, torch.tensor(9), "ridge")
    truth = queries[0] * growth
    assert float((predicted - truth).norm() / truth.norm()) <= RIDGE_STRENGTH


def test_spade_stays_inside_the_convex_hull_of_the_queries() -> None:
    """Softmax weights are positive and sum to one, so no element can leave the queries' range."""
    queries = torch.randn(6, 17, 16)
    predicted = predict_next_query(queries, torch.tensor(17), "spade")
    slack = 17 * UNIT_ROUNDOFF * queries.abs().amax()
    seen = queries[:, :-1]
    assert (predicted <= seen.amax(-2) + slack).all()
    assert (predicted >= seen.amin(-2) - slack).all()


def test_spade_favours_what_followed_the_most_similar_queries() -> None:
    """In 0 1 0 1 0 a 1 has followed every 0: it must weigh more than in a plain average."""
    queries = 8 * torch.nn.functional.one_hot(torch.tensor([0, 1, 0, 1, 0]), 2).float()
    predicted = predict_next_query(queries, torch.tensor(5), "spade")
    windows = [queries[:n].mean(0) for n in range(1, 5)]
    assert predicted[1] > torch.stack(windows).mean(0)[1]


def test_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'median'.*use last, ema, spade or ridge"):
        predict_next_query(torch.zeros(2, 4), torch.tensor(1), "median")  # type: ignore[arg-type]
