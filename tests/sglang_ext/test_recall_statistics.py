"""Measurements of selections, summed up by layer and head."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.protocol import Measurement
from sglang_ext.recall import Means, RecallStatistics

CONFIG = CacheRankConfig(
    ModelShape(layers=3, query_heads=4, kv_heads=2, head_dim=8, dtype="float32", scale=1.0),
    layers_per_group=2,
    query_window=2,
)


def heads(value: float, layers: int, count: int = 2) -> list[list[float]]:
    """What is measured of a head is `value` plus its numbers of layer and head."""
    return [[value + layer + head / 10 for head in range(count)] for layer in range(layers)]


def measurement(first_layer: int, layers: int, value: float) -> Measurement:
    """The things that the cache rank measures are multiples of `value`."""
    return Measurement(
        7,
        30,
        first_layer,
        heads(value, layers),
        heads(2 * value, layers),
        heads(3 * value, layers, 4),
        heads(4 * value, layers),
        [heads(5 * value, layers), heads(6 * value, layers)],
    )


def true_shares(layers: int, value: float) -> Tensor:
    return torch.tensor([heads(7 * value, layers), heads(8 * value, layers)])


def statistics_with(first_layer: int = 1) -> RecallStatistics:
    return RecallStatistics(CONFIG, first_layer, has_true_keys=True)


def test_there_is_nothing_before_the_first_measurement() -> None:
    statistics = statistics_with()
    assert statistics.by_head() is None
    assert statistics.latest is None


def test_means_are_those_of_each_layer_and_head() -> None:
    statistics = statistics_with()
    for first, layers, value in ((0, 2, 1.0), (0, 2, 2.0), (2, 1, 5.0)):
        statistics.add(measurement(first, layers, value), true_shares(layers, value))
    assert statistics.by_head() == {
        "layers": [1, 2, 3],
        "measurements": [2, 2, 1],
        "recall": [[10.5, 10.6], [11.5, 11.6], [35.0, 35.1]],
        "attention_mass": [[12.0, 12.1], [13.0, 13.1], [40.0, 40.1]],
        "held_recall": [[1.5, 1.6], [2.5, 2.6], [5.0, 5.1]],
        "held_attention_mass": [[3.0, 3.1], [4.0, 4.1], [10.0, 10.1]],
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
    statistics = statistics_with(first_layer=0)
    statistics.add(measurement(2, 1, 1.0), true_shares(1, 1.0))
    found = statistics.by_head()
    assert found is not None
    assert found["layers"] == [2]
    assert found["recall"] == [[7.0, 7.1]]
    assert found["overlap"]["2"] == [[6.0, 6.1]]


def test_a_measurement_says_the_means_of_its_layers() -> None:
    statistics = statistics_with()
    by_layer = statistics.add(measurement(0, 2, 1.0), true_shares(2, 1.0))
    assert by_layer.keys() == {1, 2}
    assert by_layer[1] == pytest.approx(Means(7.05, 8.05, 1.05, 2.05, 3.15))
    assert by_layer[2] == pytest.approx(Means(8.05, 9.05, 2.05, 3.05, 4.15))
    assert statistics.latest == pytest.approx(Means(7.55, 8.55, 1.55, 2.55, 3.65))
    assert statistics.add(measurement(2, 1, 5.0), true_shares(1, 5.0)).keys() == {3}


def test_without_the_true_keys_what_takes_them_is_absent() -> None:
    statistics = RecallStatistics(CONFIG, first_layer=1, has_true_keys=False)
    by_layer = statistics.add(measurement(0, 1, 1.0), None)
    assert by_layer[1][:2] == (None, None)
    assert by_layer[1][2:] == pytest.approx((1.05, 2.05, 3.15))
    found = statistics.by_head()
    assert found is not None
    assert found["held_recall"] == [[1.0, 1.1]]
    assert not {"recall", "attention_mass"} & found.keys()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("is_true", [True, False])
def test_a_measurement_that_is_not_finite_is_left_out(value: float, is_true: bool) -> None:
    statistics = statistics_with()
    statistics.add(measurement(0, 2, 1.0), true_shares(2, 1.0))
    before: Any = statistics.by_head(), statistics.latest
    held, true = (1.0, value) if is_true else (value, 1.0)
    assert statistics.add(measurement(0, 2, held), true_shares(2, true)) == {}
    assert (statistics.by_head(), statistics.latest) == before
