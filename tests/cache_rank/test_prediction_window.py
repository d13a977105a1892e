"""The query window of a sequence, and prediction from it in both frames."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from cache_rank_kernels.predict.reference import RIDGE_STRENGTH, predict_next_query
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import GQA, ROTARY_FREQUENCY, small_config
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.prediction import QueryPredictor, QueryWindow

CPU = torch.device("cpu")
PREDICTORS = ("last", "ema", "spade", "ridge")
ROTARY = {
    "halves": msgspec.structs.replace(GQA, rotary_frequency=ROTARY_FREQUENCY),
    "interleaved": msgspec.structs.replace(
        GQA, rotary_frequency=ROTARY_FREQUENCY, rotary_interleaved=True
    ),
    "partial": msgspec.structs.replace(GQA, rotary_frequency=ROTARY_FREQUENCY[:2]),
}
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


def random_queries(config: CacheRankConfig, tokens: int) -> Tensor:
    """(tokens, layers, Hq, D), oldest first."""
    model = config.model
    return torch.randn(tokens, model.layers, model.query_heads, model.head_dim)


def filled_window(config: CacheRankConfig, queries: Tensor) -> QueryWindow:
    window = QueryWindow(config, CPU)
    for query in queries:
        window.push(range(config.model.layers), query)
    return window


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 3))
def test_the_window_keeps_the_newest_queries_newest_first(
    window_size: int, tokens: int, layers_per_group: int
) -> None:
    config = small_config(query_window=window_size, layers_per_group=layers_per_group)
    queries = random_queries(config, tokens)
    window = QueryWindow(config, CPU)
    for query in queries:
        for layers in config.groups:
            window.push(layers, query[layers.start : layers.stop])
    count = min(tokens, window_size + 1)
    assert window.counts == [count] * config.model.layers
    for age in range(count):
        assert torch.equal(window.queries[:, :, age], queries[tokens - 1 - age])


def test_a_group_that_is_ahead_leaves_the_other_layers_alone() -> None:
    config = small_config()
    queries = random_queries(config, 2)
    window = filled_window(config, queries[:1])
    window.push(range(0, 2), queries[1, :2])
    assert window.counts == [2, 2, 1]
    assert torch.equal(window.queries[2, :, 0], queries[0, 2])
    assert torch.equal(window.queries[:2, :, 0], queries[1, :2])
    assert torch.equal(window.queries[:2, :, 1], queries[0, :2])


def test_queries_of_the_pool_dtype_are_kept_exactly() -> None:
    config = small_config()
    queries = random_queries(config, 3).bfloat16()
    window = filled_window(config, queries)
    assert window.queries.dtype == torch.float32
    assert torch.equal(window.queries[:, :, 0], queries[2].float())


@pytest.mark.parametrize("method", PREDICTORS)
def test_the_post_frame_predicts_from_queries_as_they_came(method: Any) -> None:
    torch.manual_seed(0)
    config = small_config(query_predictor=method)
    queries = random_queries(config, 9)
    window = filled_window(config, queries)
    predicted = QueryPredictor(config, CPU).predict([window], range(1, 3))
    newest_first = queries.flip(0)[:5, 1:3].permute(1, 2, 0, 3)
    expected = predict_next_query(newest_first, torch.tensor(5), method)
    assert predicted.shape == (1, 2, config.model.query_heads, config.model.head_dim)
    assert torch.equal(predicted[0], expected)


@pytest.mark.parametrize("frame", ["post", "pre"])
@pytest.mark.parametrize("method", PREDICTORS)
def test_a_prediction_does_not_depend_on_its_batch_mates(method: str, frame: str) -> None:
    torch.manual_seed(0)
    config = small_config(ROTARY["halves"], query_predictor=method, query_frame=frame)
    windows = [filled_window(config, random_queries(config, count)) for count in (1, 2, 5, 12)]
    predictor = QueryPredictor(config, CPU)
    for layers in config.groups:
        together = predictor.predict(windows, layers)
        for row, window in enumerate(windows):
            assert torch.equal(together[row], predictor.predict([window], layers)[0])


def rotate(content: Tensor, position: int, config: CacheRankConfig) -> Tensor:
    """Rotate content (..., D) to a position in float64, pair by pair, as complex numbers."""
    model = config.model
    half = len(model.rotary_frequency)
    rotated = content.double()
    for pair, frequency in enumerate(model.rotary_frequency):
        places = (2 * pair, 2 * pair + 1) if model.rotary_interleaved else (pair, pair + half)
        real, imaginary = (content[..., place].double() for place in places)
        angle = torch.tensor(position * frequency, dtype=torch.float64)
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
        rotated[..., places[0]], rotated[..., places[1]] = turned.real, turned.imag
    return rotated


@pytest.mark.parametrize("pushed", [1, 2, 3, 9])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("method", PREDICTORS)
def test_the_pre_frame_predicts_a_purely_rotating_query_exactly(
    method: str, rotary: str, pushed: int
) -> None:
    """Weights of `last`, `ema` and `spade` sum to one; of `ridge` to one less its strength."""
    torch.manual_seed(0)
    config = small_config(ROTARY[rotary], query_predictor=method, query_frame="pre")
    model = config.model
    content = torch.randn(model.layers, model.query_heads, model.head_dim)
    position = 1000
    own = range(position - pushed + 1, position + 1)
    window = filled_window(config, torch.stack([rotate(content, p, config) for p in own]).float())
    predicted = QueryPredictor(config, CPU).predict([window], range(model.layers))[0]
    truth = rotate(content, position + 1, config)
    # Queries round to float32, angles of up to W + 1 to half an ulp, products and sums a few times.
    rounding = (2 * (config.query_window + 1) + 12) * UNIT_ROUNDOFF
    shrinkage = RIDGE_STRENGTH if method == "ridge" and pushed > 1 else 0.0
    error = (predicted - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert float(error.max()) <= shrinkage + rounding


@pytest.mark.parametrize("method", PREDICTORS)
def test_without_rotary_embedding_the_frames_are_the_same(method: str) -> None:
    torch.manual_seed(0)
    post = small_config(GQA, query_predictor=method, query_frame="post")
    pre = msgspec.structs.replace(post, query_frame="pre")
    window = filled_window(post, random_queries(post, 9))
    layers = range(GQA.layers)
    predicted = [QueryPredictor(config, CPU).predict([window], layers) for config in (post, pre)]
    assert torch.equal(*predicted)


def test_the_post_frame_does_not_know_of_rotation() -> None:
    config = small_config(ROTARY["halves"], query_predictor="last")
    content = torch.randn(config.model.layers, config.model.query_heads, config.model.head_dim)
    window = filled_window(config, rotate(content, 7, config).float().unsqueeze(0))
    predicted = QueryPredictor(config, CPU).predict([window], range(config.model.layers))[0]
    assert torch.equal(predicted, rotate(content, 7, config).float())
