"""`bf16`: tokens as they came, in the pool's dtype. The reference for every other format.

With `score_keys` fp8, scores are computed from a second copy of the keys in 8 bits: half the bytes
to read in every step, for a quarter more memory. What is shipped is exact either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.operations import operations_for
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.options import require_options

if TYPE_CHECKING:
    from cache_rank.residency import StepRows

_SCORES_ROUNDING = 4096
"""Score buffers grow by this many tokens, so that they rarely grow."""


class Bf16Residency:
    """Pools of (pages, layers, Hkv, PAGE_TOKENS, D)."""

    lossless: ClassVar[bool] = True
    runs_on_gpu: ClassVar[bool] = True

    @staticmethod
    def validate(options: Mapping[str, OptionValue]) -> None:
        require_options("bf16", options, {})

    @staticmethod
    def fixed_bytes(config: CacheRankConfig) -> int:
        return 0

    @staticmethod
    def bytes_per_token(config: CacheRankConfig) -> int:
        model = config.model
        coarse = model.layers * model.kv_heads * model.head_dim
        return model.bytes_per_token + (coarse if config.score_keys == "fp8" else 0)

    def __init__(self, config: CacheRankConfig, pages: int, device: torch.device) -> None:
        model = config.model
        shape = (pages, model.layers, model.kv_heads, PAGE_TOKENS, model.head_dim)
        self._keys = torch.empty(shape, dtype=model.torch_dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self._coarse_keys = None
        if config.score_keys == "fp8":
            self._coarse_keys = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        self.page_bytes = PAGE_TOKENS * self.bytes_per_token(config)
        self._model = model
        self._device = device
        self._operations = operations_for(device)
        self._scores = [torch.empty(0, device=device)] * 2
        self._workspace: Any = None
        self._workspace_for = (0, 0, 0)

    def load(self, pages: Tensor, slot: int, start: int, shipment: Tensor) -> None:
        self._operations.load_tokens(
            shipment, self._keys, self._values, pages, start, self._coarse_keys
        )

    def append(self, rows: StepRows, layers: range, up: Tensor, query_ring: Tensor) -> None:
        self._operations.append_step(
            up,
            self._keys,
            self._values,
            query_ring,
            rows.page_table,
            rows.slots,
            rows.positions,
            layers.start,
            self._coarse_keys,
        )

    def score(
        self, rows: StepRows, layers: range, queries: Tensor, turn: int, exact: bool = False
    ) -> Tensor:
        model, count = self._model, queries.shape[0]
        capacity = -(-rows.capacity // _SCORES_ROUNDING) * _SCORES_ROUNDING
        out = self._scores_buffer(count, len(layers), capacity, turn)
        coarse = self._coarse_keys
        self._operations.score_step(
            queries,
            self._keys if exact or coarse is None else coarse,
            rows.page_table,
            rows.slots,
            rows.positions,
            layers.start,
            model.scale,
            self._workspace,
            out,
        )
        return out

    def gather(
        self, rows: StepRows, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        self._operations.gather_step(
            self._keys,
            self._values,
            rows.page_table,
            rows.slots,
            layers.start,
            entering,
            keys,
            values,
        )

    def read(
        self, pages: Tensor, slot: int, layers: range, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer = torch.arange(layers.start, layers.stop, device=self._device).view(-1, 1, 1)
        head = torch.arange(self._model.kv_heads, device=self._device).view(1, -1, 1)
        index = (pages[positions // PAGE_TOKENS], layer, head, positions % PAGE_TOKENS)
        return self._keys[index], self._values[index]

    def _scores_buffer(self, rows: int, layers: int, capacity: int, turn: int) -> Tensor:
        model = self._model
        shape = (rows, layers, model.kv_heads, capacity)
        size = rows * layers * model.kv_heads * capacity
        if self._scores[turn].numel() < size:
            self._scores[turn] = torch.empty(size, dtype=torch.float32, device=self._device)
        needed = (rows, layers, capacity)
        if any(have < need for have, need in zip(self._workspace_for, needed, strict=True)):
            have = self._workspace_for
            self._workspace_for = (
                max(have[0], rows),
                max(have[1], layers),
                max(have[2], capacity),
            )
            self._workspace = self._operations.score_workspace(
                self._workspace_for[0],
                self._workspace_for[1],
                model.kv_heads,
                model.query_heads // model.kv_heads,
                self._workspace_for[2],
                self._device,
            )
        return self._scores[turn][:size].view(shape)
