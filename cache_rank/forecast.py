"""Queries of layer groups to come, forecast from the hidden state of the same step."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.operations import operations_for
from cache_rank.step_rows import StepRows


class Forecast:
    """Projections of the groups that are forecast, and memory for queries: both stay in place."""

    def __init__(self, config: CacheRankConfig, device: torch.device) -> None:
        """Take memory; forecasts are zero until `load` has brought the projections."""
        model = config.model
        self._config = config
        self._operations = operations_for(device)
        self._frequency: Tensor | None = None
        if model.rotary_frequency:
            self._frequency = torch.tensor(model.rotary_frequency, device=device)
        self._projections: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        self._query_norms: dict[int, Tensor] = {}
        for group, layers in enumerate(config.groups):
            if group < config.forecast_lead:
                continue
            heads = (len(layers), model.query_heads, model.head_dim)
            zeros = functools.partial(torch.zeros, dtype=model.torch_dtype, device=device)
            self._projections[group] = zeros((model.hidden_size, math.prod(heads)))
            self._constants[group] = zeros(math.prod(heads))
            self._query_norms[group] = zeros(heads)
        largest_group = max(map(len, config.groups))
        self._queries = torch.empty(
            config.max_rows * largest_group * model.query_heads * model.head_dim,
            dtype=torch.float32,
            device=device,
        )

    def load(self, layer: int, projection: Tensor) -> None:
        """Take over by what a layer is forecast, (H + 2, Hq, D); see protocol.Projection."""
        config = self._config
        group = layer // config.layers_per_group
        if group < config.forecast_lead:
            return
        index = layer - config.groups[group].start
        constant, query_norm = projection[-2:]
        width = constant.numel()
        own = slice(index * width, (index + 1) * width)
        self._projections[group][:, own] = projection[:-2].flatten(1)
        self._constants[group][own] = constant.flatten()
        self._query_norms[group][index] = query_norm

    def predict(self, rows: StepRows, group: int, hidden: Tensor) -> Tensor:
        """Forecast the queries of a group.

        Args:
            rows: the rows of the step.
            group: one that is answered for the same step.
            hidden: (R, H), what entered the group that lies the lead before it.

        Returns:
            (R, L, Hq, D) float32, valid until the next call; those of a refused row are arbitrary.
        """
        model = self._config.model
        heads = self._query_norms[group]
        shape = (hidden.shape[0], *heads.shape)
        queries = self._queries[: math.prod(shape)].view(shape)
        self._operations.forecast_step(
            hidden,
            self._projections[group],
            self._constants[group],
            None if model.query_norm_epsilon is None else heads,
            rows.positions,
            rows.slots,
            self._frequency,
            model.rotary_interleaved,
            model.rotary_scale,
            model.norm_epsilon,
            model.query_norm_epsilon or 0.0,
            queries,
        )
        return queries
