"""Which token sits in which slot of the inference rank's working sets.

The cache rank chose it, so it need not ask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.select import select_step, select_workspace
from cache_rank.kernels.select.reference import EMPTY


class SlotMap:
    """Slots of all sequences, and memory for changes to them: both stay where they are.

    Attributes:
        tokens: (sequence slots, layers, Hkv, k) int32, which token sits in which slot, if any.
        changed: (groups, R, 2) int32, for the counts of `select`.
    """

    def __init__(self, config: CacheRankConfig, device: torch.device) -> None:
        model, slots = config.model, config.max_rows
        self._config = config
        self.tokens = torch.full(
            (slots, model.layers, model.kv_heads, config.sparse_budget),
            EMPTY,
            dtype=torch.int32,
            device=device,
        )
        self.changed = torch.zeros((len(config.groups), slots, 2), dtype=torch.int32, device=device)
        largest_group = max(len(layers) for layers in config.groups)
        self._entering = torch.empty(
            slots * largest_group * model.kv_heads * config.max_swap_tokens,
            dtype=torch.int32,
            device=device,
        )
        self._workspace = select_workspace(
            slots,
            largest_group,
            model.kv_heads,
            config.sparse_budget,
            config.hysteresis,
            device,
        )

    def select(
        self, rows: BatchMetadata, layers: range, scores: Tensor, slots: Tensor, changed: Tensor
    ) -> None:
        """Choose the tokens of an answered step, with hysteresis, and put them into slots.

        The slots that tokens enter are written to `slots`, (R, len(layers), Hkv, C) int32, with -1
        as padding; `entering` says which tokens these are. How many entered, and how many must wait
        for a later step, is added to `changed`, (R, 2) int32. `scores` may be overwritten.
        """
        config = self._config
        select_step(
            scores,
            self.tokens,
            rows.slots,
            rows.positions,
            rows.budgets,
            layers.start,
            config.sink_tokens,
            config.recent_tokens,
            config.hysteresis,
            self._workspace,
            self.entering(slots),
            slots,
            changed,
        )

    def entering(self, slots: Tensor) -> Tensor:
        """Which tokens the last `select` put into these slots: int32 of their shape, a view."""
        return self._entering[: slots.numel()].view(slots.shape)
