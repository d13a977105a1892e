"""What was measured of selections, summed up by layer and head."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.measure.recall import overlap_distances
from cache_rank.protocol import Measurement

_DIGITS = 4
"""Means are rounded to this many digits in `/server_info`."""


class Means(NamedTuple):
    """What one measurement says: means over heads, and over layers where it is of several.

    Attributes:
        recall, attention_mass: by the keys as they came; None where nobody has them.
        held_recall, held_attention_mass: by the keys as the residency format holds them.
        query_cosine: of the prediction and the true query.
    """

    recall: float | None
    attention_mass: float | None
    held_recall: float
    held_attention_mass: float
    query_cosine: float


TRUE = ("recall", "attention_mass")
"""These take the keys as they came."""


class RecallStatistics:
    """Sums up all measurements since the server started."""

    def __init__(self, config: CacheRankConfig, first_layer: int, has_true_keys: bool) -> None:
        """Begin with no measurement.

        Args:
            config: the configuration of the cache rank.
            first_layer: the model's first sparse layer.
            has_true_keys: whether the keys as they came are there to measure by.
        """
        model = config.model
        self._first_layer = first_layer
        self._distances = overlap_distances(config.query_window)
        self._counts: NDArray[Any] = np.zeros(model.layers, dtype=np.int64)
        by_kv_head, by_query_head = (
            (model.layers, model.kv_heads),
            (model.layers, model.query_heads),
        )
        self._sums: dict[str, NDArray[Any]] = {
            **{name: np.zeros(by_kv_head) for name in (TRUE if has_true_keys else ())},
            "held_recall": np.zeros(by_kv_head),
            "held_attention_mass": np.zeros(by_kv_head),
            "query_cosine": np.zeros(by_query_head),
            "prediction_overlap": np.zeros(by_kv_head),
            "overlap": np.zeros((len(self._distances), *by_kv_head)),
        }
        self._latest: Means | None = None

    @property
    def measured(self) -> tuple[str, ...]:
        """The fields of `Means` that are measured."""
        return tuple(name for name in Means._fields if name in self._sums)

    def add(self, measurement: Measurement, true_shares: Tensor | None) -> dict[int, Means]:
        """Add a measurement, unless it is not finite, as the queries or keys of its request.

        Args:
            measurement: by the keys that the cache rank holds.
            true_shares: (2, L, Hkv) recall and attention mass of the same step by the keys as they
                came, where somebody has them.

        Returns:
            Its means over heads, by layer of the model; nothing if it was left out.
        """
        values = {
            name: np.asarray(getattr(measurement, name)) for name in self._sums if name not in TRUE
        }
        if true_shares is not None:
            values.update(zip(TRUE, true_shares.double().numpy(), strict=True))
        if not all(np.isfinite(value).all() for value in values.values()):
            return {}
        first, count = measurement.first_layer, len(measurement.held_recall)
        layers = slice(first, first + count)
        self._counts[layers] += 1
        for name, sums in self._sums.items():
            sums[..., layers, :] += values[name]
        self._latest = self._means_of({name: values[name].mean() for name in self.measured})
        by_layer = {name: values[name].mean(-1) for name in self.measured}
        return {
            self._first_layer + first + layer: self._means_of(
                {name: means[layer] for name, means in by_layer.items()}
            )
            for layer in range(count)
        }

    def _means_of(self, values: dict[str, Any]) -> Means:
        return Means._make(
            float(values[name]) if name in values else None for name in Means._fields
        )

    @property
    def latest(self) -> Means | None:
        """The last measurement; None before the first."""
        return self._latest

    def by_head(self) -> dict[str, Any] | None:
        """Means over all measurements, for `/server_info`; None before the first.

        Returns:
            `layers`: the layers that were measured, numbered as in the model.
            `measurements`: how often each was measured.
            `recall`, `attention_mass`: (layers, Hkv); absent without the keys as they came.
            `held_recall`, `held_attention_mass`, `prediction_overlap`: (layers, Hkv).
            `query_cosine`: (layers, Hq).
            `overlap`: (layers, Hkv) for each distance in steps.
        """
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
