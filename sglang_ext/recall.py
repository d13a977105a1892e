"""What the cache rank measured of selections, summed up by layer and head.

Measurements arrive in the supervisor's thread. The scheduler's thread reads what they sum up to,
and takes what each says of its request.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_rank.config import CacheRankConfig
from cache_rank.measure.recall import overlap_distances
from cache_rank.protocol import Measurement

_DIGITS = 4
"""Means are rounded to this many digits in `/server_info`."""


class MeasuredRequest(NamedTuple):
    """What one measurement says of its request: means over the layers and heads of a group."""

    epoch: int
    recall: float
    attention_mass: float


class LayerMeans(NamedTuple):
    """What one measurement says of a layer: means over its heads."""

    recall: float
    attention_mass: float
    query_cosine: float


class RecallStatistics:
    """Sums up all measurements since the server started."""

    def __init__(self, config: CacheRankConfig, first_layer: int) -> None:
        """Begin with no measurement.

        Args:
            config: the configuration of the cache rank.
            first_layer: the model's first sparse layer.
        """
        model = config.model
        self._first_layer = first_layer
        self._distances = overlap_distances(config.query_window)
        self._lock = threading.Lock()
        self._requests: deque[MeasuredRequest] = deque()
        self._counts: NDArray[Any] = np.zeros(model.layers, dtype=np.int64)
        by_kv_head, by_query_head = (
            (model.layers, model.kv_heads),
            (model.layers, model.query_heads),
        )
        self._sums: dict[str, NDArray[Any]] = {
            "recall": np.zeros(by_kv_head),
            "attention_mass": np.zeros(by_kv_head),
            "query_cosine": np.zeros(by_query_head),
            "prediction_overlap": np.zeros(by_kv_head),
            "overlap": np.zeros((len(self._distances), *by_kv_head)),
        }
        self._latest: LayerMeans | None = None

    def add(self, measurement: Measurement) -> dict[int, LayerMeans]:
        """Add a measurement, unless it is not finite, as the queries or keys of its request.

        Returns:
            Its means over heads, by layer of the model; nothing if it was left out.
        """
        values = {name: np.asarray(getattr(measurement, name)) for name in self._sums}
        if not all(np.isfinite(value).all() for value in values.values()):
            return {}
        first, count = measurement.first_layer, len(measurement.recall)
        layers = slice(first, first + count)
        with self._lock:
            self._counts[layers] += 1
            for name, value in values.items():
                self._sums[name][..., layers, :] += value
            self._latest = LayerMeans(*(float(values[name].mean()) for name in LayerMeans._fields))
            self._requests.append(MeasuredRequest(measurement.epoch, *self._latest[:2]))
        by_layer = zip(
            *(values[name].mean(-1).tolist() for name in LayerMeans._fields), strict=True
        )
        return {
            self._first_layer + first + layer: LayerMeans(*means)
            for layer, means in enumerate(by_layer)
        }

    @property
    def latest(self) -> LayerMeans | None:
        """The last measurement, as means over its layers too; None before the first."""
        return self._latest

    def take_requests(self) -> list[MeasuredRequest]:
        """Hand over what was measured of requests since the last call."""
        taken = []
        while self._requests:
            taken.append(self._requests.popleft())
        return taken

    def by_head(self) -> dict[str, Any] | None:
        """Means over all measurements, for `/server_info`; None before the first.

        Returns:
            `layers`: the layers that were measured, numbered as in the model.
            `measurements`: how often each was measured.
            `recall`, `attention_mass`, `prediction_overlap`: (layers, Hkv).
            `query_cosine`: (layers, Hq).
            `overlap`: (layers, Hkv) for each distance in steps.
        """
        with self._lock:
            measured = self._counts.nonzero()[0]
            counts = self._counts[measured]
            means = {
                name: (sums[..., measured, :] / counts[:, None]).round(_DIGITS).tolist()
                for name, sums in self._sums.items()
            }
        if not measured.size:
            return None
        distances = (str(distance) for distance in self._distances)
        return {
            "layers": (measured + self._first_layer).tolist(),
            "measurements": counts.tolist(),
            **means,
            "overlap": dict(zip(distances, means["overlap"], strict=True)),
        }
