"""Everything the cache rank owns for one epoch: residency, query window, mirror."""

from __future__ import annotations

import torch
from cache_rank_kernels.checksum.reference import slots_checksum
from cache_rank_kernels.select.reference import EMPTY, Selection, select_tokens
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig
from cache_rank.prediction import QueryWindow


class Sequence:
    """One incarnation of a request on the inference rank.

    Attributes:
        residency: K and V of all its tokens.
        window: its newest queries.
        mirror: (layers, Hkv, k) int64, which token sits in which slot on the inference rank.
        filled: per layer, how many slots are in use.
    """

    def __init__(self, epoch: int, config: CacheRankConfig, device: torch.device) -> None:
        model = config.model
        self.epoch = epoch
        self.residency = residency.create(config.kv_residency, model, device)
        self.window = QueryWindow(config, device)
        self.mirror = torch.full(
            (model.layers, model.kv_heads, config.sparse_budget), EMPTY, device=device
        )
        self.filled = [0] * model.layers
        self._config = config

    def append(self, layers: range, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take over one decoded token: (len(layers), heads, D) each."""
        self.residency.append(layers, keys.unsqueeze(1), values.unsqueeze(1))
        self.window.push(layers, queries)

    def select(self, layers: range, predicted: Tensor, position: int) -> Selection:
        """Choose the tokens of the step after `position` and update the mirror.

        Args:
            layers: which layers.
            predicted: (len(layers), Hq, D) next queries.
            position: of the newest resident token.
        """
        config = self._config
        group = slice(layers.start, layers.stop)
        selection = select_tokens(
            self.residency.score(layers, predicted, config.model.scale),
            self.mirror[group],
            config.candidates_after(position),
            config.selection_margin,
            config.delta_capacity,
        )
        self.mirror[group] = selection.mirror
        filled = config.filled_after(position, self.filled[layers.start])
        self.filled[group] = [filled] * len(layers)
        return selection

    def checksum(self, layers: range) -> int:
        """Checksum of the slots in use, as the inference rank must hold them."""
        filled = self.filled[layers.start]
        mirror = self.mirror[layers.start : layers.stop, :, :filled]
        return slots_checksum(*self.residency.gather(layers, mirror))
