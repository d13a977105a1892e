"""Predictions from a ring of queries, in the frame of the cache rank's configuration."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
import torch
from small_models import GQA, ROTARY_FREQUENCY, small_config, with_rotary
from torch import Tensor

from cache_rank.config import CacheRankConfig, Predictor
from cache_rank.measure.timeline import Timeline
from cache_rank.protocol import DownMessage, Row, UpMessage
from cache_rank.selector import Selector

PREDICTORS = [method for method in get_args(Predictor) if method != "forecast"]
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2
FLOAT32 = msgspec.structs.replace(GQA, dtype="float32")
ROTARY = {
    "halves": with_rotary(FLOAT32),
    "interleaved": with_rotary(FLOAT32, interleaved=True),
    "partial": msgspec.structs.replace(FLOAT32, rotary_frequency=ROTARY_FREQUENCY[:2]),
}


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


def predicted_after(
    queries: Tensor, prompt: int, config: CacheRankConfig, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """What a selector predicts after a prompt and steps of queries (steps, layers, Hq, D).

    Returns:
        (layers, Hq, D) float32.
    """
    model = config.model
    selector = Selector(config, torch.device("cpu"), 1 << 24)
    predicted: list[Tensor] = []

    def keep(rows: object, layers: range, queries: Tensor, chosen: Tensor) -> Tensor:
        predicted.append(queries[0].clone())
        return torch.zeros((1, *queries.shape[1:2], model.kv_heads, prompt + 64))

    monkeypatch.setattr(selector._residency, "score", keep)
    shipment = torch.zeros((2, model.layers, prompt, model.kv_heads, model.head_dim))
    selector.load(selector.begin(1), shipment)
    for number, query in enumerate(queries):
        predicted.clear()
        step = selector.begin_step(number, [Row(1, prompt + number)])
        for layer_message, layers in zip(config.layer_messages, config.groups, strict=True):
            size = UpMessage.size(config, layer_message, 1)
            up = UpMessage(config, layer_message, 1, torch.zeros(size, dtype=torch.uint8))
            up.queries[0] = query[layers.start : layers.stop]
            size = DownMessage.size(config, len(layers), 1)
            down = DownMessage(config, len(layers), 1, torch.zeros(size, dtype=torch.uint8))
            selector.serve(step, layer_message, up, down, Timeline("", torch.device("cpu")))
    return torch.cat(predicted)


@pytest.mark.parametrize("pushed", [1, 2, 9])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("method", PREDICTORS)
def test_a_query_that_only_rotates_is_predicted_exactly(
    method: str, rotary: str, pushed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights sum to one."""
    torch.manual_seed(0)
    config = small_config(ROTARY[rotary], query_predictor=method)
    model = config.model
    content = torch.randn(model.layers, model.query_heads, model.head_dim)
    position = 1000
    own = range(position - pushed + 1, position + 1)
    queries = torch.stack([rotate(content, p, config) for p in own]).float()
    predicted = predicted_after(queries, own.start, config, monkeypatch)
    truth = rotate(content, position + 1, config)
    # Queries round to float32, angles of up to W + 1 to half an ulp, products and sums a few times.
    rounding = (2 * (config.query_window + 1) + 12) * UNIT_ROUNDOFF
    error = (predicted - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert float(error.max()) <= rounding


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5])
def test_a_prediction_does_not_depend_on_where_the_ring_begins(
    prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = small_config(FLOAT32, query_predictor="spade")
    queries = torch.randn(7, FLOAT32.layers, FLOAT32.query_heads, FLOAT32.head_dim)
    expected = predicted_after(queries[-5:], 20, config, monkeypatch)
    assert torch.equal(predicted_after(queries, prompt, config, monkeypatch), expected)
