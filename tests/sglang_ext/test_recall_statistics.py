"""Measurements of selections, summed up by layer and head."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.protocol import Measurement
from sglang_ext.recall import LayerMeans, MeasuredRequest, RecallStatistics

CONFIG = CacheRankConfig(
    ModelShape(layers=3, query_heads=4, kv_heads=2, head_dim=8, dtype="float32", scale=1.0),
    layers_per_group=2,
    query_window=2,
)


def measurement(epoch: int, first_layer: int, layers: int, value: float) -> Measurement:
    """All that is measured of a head is a multiple of `value` plus its number of layer and head."""

    def heads(times: int, count: int = 2) -> list[list[float]]:
        return [
            [times * value + layer + head / 10 for head in range(count)] for layer in range(layers)
        ]

    return Measurement(
        epoch, first_layer, heads(1), heads(2), heads(3, 4), heads(4), [heads(5), heads(6)]
    )


def test_there_is_nothing_before_the_first_measurement() -> None:
    statistics = RecallStatistics(CONFIG, first_layer=1)
    assert statistics.by_head() is None
    assert statistics.latest is None
    assert statistics.take_requests() == []


def test_means_are_those_of_each_layer_and_head() -> None:
    statistics = RecallStatistics(CONFIG, first_layer=1)
    for one in (measurement(7, 0, 2, 1.0), measurement(8, 0, 2, 2.0), measurement(7, 2, 1, 5.0)):
        statistics.add(one)
    assert statistics.by_head() == {
        "layers": [1, 2, 3],
        "measurements": [2, 2, 1],
        "recall": [[1.5, 1.6], [2.5, 2.6], [5.0, 5.1]],
        "attention_mass": [[3.0, 3.1], [4.0, 4.1], [10.0, 10.1]],
        "query_cosine": [
            [4.5, 4.6, 4.7, 4.8],
            [5.5, 5.6, 5.7, 5.8],
            [15.0, 15.1, 15.2, 15.3],
        ],
        "prediction_overlap": [[6.0, 6.1], [7.0, 7.1], [20.0, 20.1]],
        "overlap": {
            "1": [[7.5, 7.6], [8.5, 8.6], [25.0, 25.1]],
            "2": [[9.0, 9.1], [10.0, 10.1], [30.0, 30.1]],
        },
    }


def test_layers_that_were_not_measured_are_left_out() -> None:
    statistics = RecallStatistics(CONFIG, first_layer=0)
    statistics.add(measurement(1, 2, 1, 1.0))
    found = statistics.by_head()
    assert found is not None
    assert found["layers"] == [2]
    assert found["recall"] == [[1.0, 1.1]]
    assert found["overlap"]["2"] == [[6.0, 6.1]]


def test_a_measurement_says_the_means_of_its_layers_and_of_its_request() -> None:
    statistics = RecallStatistics(CONFIG, first_layer=1)
    by_layer = statistics.add(measurement(7, 0, 2, 1.0))
    assert by_layer.keys() == {1, 2}
    assert by_layer[1] == pytest.approx(LayerMeans(1.05, 2.05, 3.15))
    assert by_layer[2] == pytest.approx(LayerMeans(2.05, 3.05, 4.15))
    assert statistics.latest == pytest.approx(LayerMeans(1.55, 2.55, 3.65))
    assert statistics.add(measurement(9, 2, 1, 5.0)).keys() == {3}
    first, second = statistics.take_requests()
    assert first == pytest.approx(MeasuredRequest(7, 1.55, 2.55))
    assert second == pytest.approx(MeasuredRequest(9, 5.05, 10.05))
    assert statistics.take_requests() == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_measurement_that_is_not_finite_is_left_out(value: float) -> None:
    statistics = RecallStatistics(CONFIG, first_layer=1)
    statistics.add(measurement(7, 0, 2, 1.0))
    before: Any = statistics.by_head(), statistics.latest
    assert statistics.add(measurement(8, 0, 2, value)) == {}
    assert (statistics.by_head(), statistics.latest) == before
    assert [request.epoch for request in statistics.take_requests()] == [7]
