"""The query window of a sequence and the prediction of its next query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cache_rank_kernels.predict.reference import predict_next_query
from cache_rank_kernels.rotary.reference import align_to_next_position
from torch import Tensor

from cache_rank.config import CacheRankConfig


class QueryWindow:
    """The newest W + 1 queries of one sequence, for every layer and head, newest first."""

    def __init__(self, config: CacheRankConfig, device: torch.device) -> None:
        model = config.model
        shape = (model.layers, model.query_heads, config.query_window + 1, model.head_dim)
        self.queries = torch.zeros(shape, dtype=torch.float32, device=device)
        self.counts = [0] * model.layers

    def push(self, layers: range, queries: Tensor) -> None:
        """Add the queries (len(layers), Hq, D) of the newest token."""
        window = self.queries[layers.start : layers.stop]
        window[:, :, 1:] = window[:, :, :-1].clone()
        window[:, :, 0] = queries
        count = min(self.counts[layers.start] + 1, window.shape[2])
        self.counts[layers.start : layers.stop] = [count] * len(layers)


class QueryPredictor:
    """Predicts next queries with the configured method in the configured frame.

    In the `post` frame the windows are used as they reach attention, each query rotated to its own
    position; in the `pre` frame rotary differences are removed first (see the rotary kernel). The
    frames are the same for a model without rotary embedding.
    """

    def __init__(self, config: CacheRankConfig, device: torch.device) -> None:
        self._method = config.query_predictor
        self._frequency = None
        self._interleaved = config.model.rotary_interleaved
        if config.query_frame == "pre" and config.model.rotary_frequency:
            self._frequency = torch.tensor(config.model.rotary_frequency, device=device)

    def predict(self, windows: Sequence[QueryWindow], layers: range) -> Tensor:
        """Predict the next query of several sequences: (sequences, len(layers), Hq, D) float32."""
        group = slice(layers.start, layers.stop)
        queries = torch.stack([window.queries[group] for window in windows])
        counts = torch.tensor(
            [window.counts[layers.start] for window in windows], device=queries.device
        )
        if self._frequency is not None:
            queries = align_to_next_position(queries, self._frequency, self._interleaved)
        return predict_next_query(queries, counts.view(-1, 1, 1), self._method)
