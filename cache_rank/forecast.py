"""Queries of layer groups, forecast from a hidden state.

That is of the step itself, from an earlier layer. For the first groups, which no layer is far
enough ahead of, it may be of the step before, from one of the last layers: these are about to tell
the next token.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels.forecast import forecast_step, forecast_workspace, reference


def forecast_layer(
    model: ModelShape, projection: Tensor, hidden: Tensor, positions: Tensor
) -> Tensor:
    """Forecast the queries of one layer in plain torch: (T, Hq, D) float32.

    `projection` is as in protocol.QueryProjection; `hidden`, (T, H), entered an earlier layer.
    """
    constant, query_norm = projection[-2:]
    heads = (model.query_heads, model.head_dim)
    queries = torch.empty((len(hidden), 1, *heads), dtype=torch.float32, device=hidden.device)
    reference.forecast_step(
        hidden,
        projection[None, :-2].transpose(1, 2),
        constant[None],
        None if model.query_norm_epsilon is None else query_norm[None],
        positions,
        torch.zeros_like(positions),
        model.frequency(hidden.device),
        model.rotary_interleaved,
        model.rotary_scale,
        model.norm_epsilon,
        model.query_norm_epsilon or 0.0,
        reference.forecast_workspace(len(hidden), 1, *heads, hidden.device),
        queries,
    )
    return queries[:, 0]


class Forecast:
    """Projections of the groups that are forecast, and memory for queries: both stay in place."""

    def __init__(self, config: CacheRankConfig, device: torch.device) -> None:
        """Take memory; forecasts are zero until `load` has brought the projections."""
        model = config.model
        self._config = config
        self._frequency = model.frequency(device)
        self._projections: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        self._query_norms: dict[int, Tensor] = {}
        most = (config.max_rows, config.layers_per_group, model.query_heads, model.head_dim)
        self._workspace = forecast_workspace(*most, device)
        self._queries = torch.zeros(math.prod(most), device=device)
        self._missing = {group: {*layers} for group, layers in enumerate(config.groups)}
        for group, layers in enumerate(config.groups):
            heads = (len(layers), model.query_heads, model.head_dim)
            zeros = functools.partial(torch.zeros, dtype=model.torch_dtype, device=device)
            self._projections[group] = zeros((*heads[:2], model.hidden_size, model.head_dim))
            self._constants[group] = zeros(heads)
            self._query_norms[group] = zeros(heads)

    def load(self, layer: int, projection: Tensor) -> None:
        """Take over by what a layer is forecast, (H + 2, Hq, D); see protocol.QueryProjection."""
        config = self._config
        group = layer // config.layers_per_group
        self._missing[group].discard(layer)
        index = layer - config.groups[group].start
        self._projections[group][index] = projection[:-2].transpose(0, 1)
        self._constants[group][index], self._query_norms[group][index] = projection[-2:]

    def knows(self, group: int) -> bool:
        """Whether projections of all layers of a group have come."""
        return not self._missing[group]

    def predict(self, rows: BatchMetadata, group: int, hidden: Tensor, same_step: bool) -> Tensor:
        """Forecast the queries of a group whose projections have come, (R, L, Hq, D) float32.

        They are valid until the next call; those of a refused row are arbitrary. They are those of
        this step, or of the next one. `hidden`, (R, H), entered the group that the message names.
        """
        model = self._config.model
        query_norms = self._query_norms[group]
        heads = (hidden.shape[0], *query_norms.shape)
        queries = self._queries[: math.prod(heads)].view(heads)
        forecast_step(
            hidden,
            self._projections[group],
            self._constants[group],
            None if model.query_norm_epsilon is None else query_norms,
            rows.positions if same_step else rows.positions + 1,
            rows.slots,
            self._frequency,
            model.rotary_interleaved,
            model.rotary_scale,
            model.norm_epsilon,
            model.query_norm_epsilon or 0.0,
            self._workspace,
            queries,
        )
        return queries
