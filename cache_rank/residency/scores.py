"""Memory that scores are written to, and the scratch of computing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cache_rank.config import ModelShape

_TOKENS = 4096
_ROWS = 8
"""Buffers grow to multiples of so many tokens and so many rows, so that they rarely grow."""


class ScoreBuffers:
    """A buffer of scores and a workspace, which grow when a step needs more."""

    def __init__(
        self, model: ModelShape, workspace: Callable[..., Any], device: torch.device
    ) -> None:
        """Start empty; `workspace` makes the scratch, see `score_workspace` of kernels/score."""
        self._model = model
        self._make_workspace = workspace
        self._device = device
        self._scores = torch.empty(0, device=device)
        self._workspace: Any = None
        self._workspace_for = (0, 0, 0)
        self._moves = 0

    def prepare(self, rows: int, layers: int, capacity: int) -> int:
        """Make room; return a number that changes whenever the memory has moved."""
        self.take(rows, layers, capacity)
        return self._moves

    def take(self, rows: int, layers: int, capacity: int) -> tuple[Any, Tensor]:
        """Return the workspace, and (rows, layers, Hkv, >= capacity) float32 for scores.

        Either holds until the next call.
        """
        capacity = -(-capacity // _TOKENS) * _TOKENS
        kv_heads = self._model.kv_heads
        size = rows * layers * kv_heads * capacity
        rounded_rows = -(-rows // _ROWS) * _ROWS if self._device.type == "cuda" else rows
        if self._scores.numel() < size:
            self._moved()
            self._scores = torch.empty(
                size // rows * rounded_rows, dtype=torch.float32, device=self._device
            )
        scores = self._scores[:size].view(rows, layers, kv_heads, capacity)
        needed = (rounded_rows, layers, capacity)
        if any(have < need for have, need in zip(self._workspace_for, needed, strict=True)):
            rows, layers, capacity = map(max, self._workspace_for, needed)
            self._workspace_for = (rows, layers, capacity)
            self._moved()
            self._workspace = self._make_workspace(
                rows, layers, kv_heads, self._model.query_heads // kv_heads, capacity, self._device
            )
        return self._workspace, scores

    def _moved(self) -> None:
        self._moves += 1
