"""`bf16`: tokens as they came, in the pool's dtype. The reference for every other format."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.append import append_step, load_tokens
from cache_rank.kernels.gather import gather_step
from cache_rank.kernels.newest.reference import attend_to
from cache_rank.kernels.rows import Shipment
from cache_rank.kernels.score import score_step
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.base import Residency


class Bf16Residency(Residency):
    """Pools of (pages, layers, Hkv, PAGE_TOKENS, D)."""

    name: ClassVar[str] = "bf16"
    lossless: ClassVar[bool] = True
    verifies: ClassVar[bool] = True

    @classmethod
    def bytes_per_token(cls, config: CacheRankConfig) -> int:
        return config.model.bytes_per_token

    def __init__(self, config: CacheRankConfig, pages: int, device: torch.device) -> None:
        super().__init__(config, pages, device)
        model = config.model
        shape = (pages, model.layers, model.kv_heads, PAGE_TOKENS, model.head_dim)
        self._keys = torch.empty(shape, dtype=model.torch_dtype, device=device)
        self._values = torch.empty_like(self._keys)

    def page_planes(self) -> tuple[Tensor, ...]:
        return self._keys, self._values

    def _load(self, shipment: Shipment) -> None:
        load_tokens(shipment, self._keys, self._values)

    def _append(self, rows: BatchMetadata, layers: range, up: Tensor, query_ring: Tensor) -> None:
        append_step(
            up,
            self._keys,
            self._values,
            query_ring,
            rows.paged,
            layers.start,
        )

    def _score(
        self, rows: BatchMetadata, layers: range, queries: Tensor, workspace: Any, out: Tensor
    ) -> None:
        score_step(
            queries,
            self._keys,
            rows.paged,
            layers.start,
            self._model.scale,
            workspace,
            out,
        )

    def attend(
        self, rows: BatchMetadata, layer: int, queries: Tensor, out: Tensor, log_sums: Tensor
    ) -> None:
        """See `Residency.attend`. It takes a copy of a row's keys and values at a time."""
        for row, (_, position) in enumerate(rows.on_host):
            keys, values = (
                rows.paged.resident(pool, slice(layer, layer + 1), row, position)
                for pool in (self._keys, self._values)
            )
            is_seen = torch.ones((1, 1, position + 1), dtype=torch.bool, device=keys.device)
            of_row = queries[row : row + 1]
            found = attend_to(of_row, keys, values, is_seen, self._model.scale)
            out[row], log_sums[row] = found[0][0], found[1][0]

    def gather(
        self, rows: BatchMetadata, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        gather_step(
            self._keys,
            self._values,
            rows.paged,
            layers.start,
            entering,
            keys,
            values,
        )
