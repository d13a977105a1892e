"""With `--inference-kv working-set`: pool rows of tokens that no table refers to any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_ext.lifecycle import SparseSequence

FREE_STRIDE = 64
"""Covered tokens are freed this many at a time: freeing costs the host a concatenation."""


class CoveredTokens:
    """Tokens before the recent window of sparse requests, on their way back to the pool."""

    def __init__(self, req_to_token: Tensor, allocator: Any, recent_tokens: int) -> None:
        """Free through SGLang's allocator the rows that its own table names."""
        self._req_to_token = req_to_token
        self._allocator = allocator
        self._recent = recent_tokens
        self._waiting: list[tuple[SparseSequence, int]] = []

    def note(self, sequence: SparseSequence, position: int) -> None:
        """A sparse request has made the step at `position`."""
        covered = position - self._recent
        if covered - sequence.request.cache_protected_len >= FREE_STRIDE:
            self._waiting.append((sequence, covered))

    def free(self) -> bool:
        """Free what was noted, on the stream that SGLang allocates on; whether there was any."""
        freed_any = False
        waiting, self._waiting = self._waiting, []
        for sequence, covered in waiting:
            request = sequence.request
            if sequence.ended or sequence.orphaned or covered <= request.cache_protected_len:
                continue
            freed = self._req_to_token[sequence.row, request.cache_protected_len : covered]
            self._allocator.free(freed.to(torch.int64))
            # SGLang frees from here on when the request ends.
            request.cache_protected_len = covered
            freed_any = True
        return freed_any
