"""The true queries of the newest tokens, and the next queries as they predict them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.append import append_step
from cache_rank.kernels.predict import predict_step


class QueryRing:
    """Queries of all sequences, and memory for predictions: both stay where they are.

    Attributes:
        entries: (slots, layers, Hq, W + 1, D) in the model's dtype; the query of position p is
            entry p % (W + 1). `Residency.append` writes them, or `append` of drafts.
    """

    def __init__(self, config: CacheRankConfig, device: torch.device) -> None:
        model, slots = config.model, config.max_rows
        heads, window = model.query_heads, config.query_window + 1
        self.entries = torch.zeros(
            (slots, model.layers, heads, window, model.head_dim),
            dtype=model.torch_dtype,
            device=device,
        )
        self._config = config
        self._frequency = model.frequency(device)
        largest_group = max(len(layers) for layers in config.groups)
        self._predicted = torch.empty(
            slots * largest_group * heads * model.head_dim, dtype=torch.float32, device=device
        )

        # Where keys and values of drafts go, which nobody reads.
        unread = (1, model.layers, model.kv_heads, 1, model.head_dim) if config.draft_steps else 0
        self._unread = torch.empty(unread, dtype=model.torch_dtype, device=device)

    def append(self, rows: BatchMetadata, layers: range, up: Tensor) -> None:
        """Take over the queries of drafts alone; see `Residency.append`."""
        nowhere = rows.paged._replace(page_table=torch.zeros_like(rows.slots).unsqueeze(1))
        append_step(up, self._unread, self._unread, self.entries, nowhere, layers.start)

    def predict(self, rows: BatchMetadata, layers: range) -> Tensor:
        """Predict the queries of the tokens after those of a step, (R, len(layers), Hq, D) float32.

        They are valid until the next call; those of a refused row are arbitrary.
        """
        config, model = self._config, self._config.model
        shape = (rows.slots.shape[0], len(layers), model.query_heads, model.head_dim)
        predicted = self._predicted[: math.prod(shape)].view(shape)
        predict_step(
            self.entries,
            rows.slots,
            rows.positions,
            rows.counts,
            layers.start,
            self._frequency,
            model.rotary_interleaved,
            config.history_predictor,
            predicted,
        )
        return predicted
