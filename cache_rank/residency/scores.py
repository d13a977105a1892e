"""Memory that scores are written to, and the scratch of computing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TOKENS = 4096
_ROWS = 8
"""Buffers grow to multiples of so many tokens and so many rows, so that they rarely grow."""


class ScoreBuffers:
    """A buffer of scores and a workspace, which grow when a step needs more.

    Attributes:
        moves: how often the memory has moved.
    """

    def __init__(
        self, kv_heads: int, make_workspace: Callable[[int, int, int], Any], device: torch.device
    ) -> None:
        """Start empty; `make_workspace` is that of a residency."""
        self.moves = 0
        self._kv_heads = kv_heads
        self._make_workspace = make_workspace
        self._device = device
        self._scores = torch.empty(0, device=device)
        self._workspace: Any = None
        self._workspace_for = (0, 0, 0)

    def take(self, rows: int, layers: int, capacity: int) -> tuple[Any, Tensor]:
        """Return the workspace, and (rows, layers, Hkv, >= capacity) float32 for scores.

        Either holds until the next call.
        """
        capacity = -(-capacity // _TOKENS) * _TOKENS
        rounded_rows = -(-rows // _ROWS) * _ROWS if self._device.type == "cuda" else rows
        of_row = layers * self._kv_heads * capacity
        if self._scores.numel() < rows * of_row:
            self.moves += 1
            size = rounded_rows * of_row
            self._scores = self._scores.new_empty(0)  # a GPU may have no room for old and new
            self._scores = torch.empty(size, dtype=torch.float32, device=self._device)
        needed = (rounded_rows, layers, capacity)
        if any(have < need for have, need in zip(self._workspace_for, needed, strict=True)):
            self.moves += 1
            most_rows, most_layers, most_tokens = map(max, self._workspace_for, needed)
            self._workspace_for = (most_rows, most_layers, most_tokens)
            self._workspace = None
            self._workspace = self._make_workspace(*self._workspace_for)
        scores = self._scores[: rows * of_row].view(rows, layers, self._kv_heads, capacity)
        return self._workspace, scores
