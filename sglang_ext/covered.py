"""With `--inference-kv working-set`: pool rows of tokens that sparse layers do not need any more.

SGLang's table names one row of a token for all layers. When that row goes back to the pool, dense
layers keep the token in rows of their own, which the table names from then on: nobody else reads it
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_ext.lifecycle import SparseSequence
from sglang_ext.model_runner import Pools

FREE_STRIDE = 64
"""Covered tokens are freed this many at a time: freeing costs the host a concatenation."""


class KeptTokens:
    """Tokens without a pool row, in the buffers of dense layers.

    Behind the reserve is a row for every position of each of its blocks.
    """

    def __init__(self, pools: Pools, dense_layers: int, first_block: int, block_rows: int) -> None:
        """Describe the rows.

        Args:
            pools: SGLang's.
            dense_layers: how many layers have these rows.
            first_block: first pool row of the reserve.
            block_rows: of a request in the reserve.
        """
        self._buffers = [*pools.keys[:dense_layers], *pools.values[:dense_layers]]
        self._first_block, self._block_rows = first_block, block_rows
        self._first_row = pools.keys[-1].shape[0]
        blocks = (self._first_row - first_block) // block_rows
        self._context = (self._buffers[0].shape[0] - self._first_row) // blocks

    def keep(self, sequence: SparseSequence, start: int, pool_rows: Tensor) -> Tensor:
        """Copy tokens here, on the current stream.

        Args:
            sequence: whose they are.
            start: position of the first.
            pool_rows: (n,) int64, where they are.

        Returns:
            (n,) int32, where they are from now on.
        """
        block = (sequence.block - self._first_block) // self._block_rows
        first = self._first_row + block * self._context + start
        stop = first + pool_rows.shape[0]
        for buffer in self._buffers:
            buffer[first:stop] = buffer[pool_rows]
        return torch.arange(first, stop, dtype=torch.int32, device=pool_rows.device)


class CoveredTokens:
    """Tokens before the recent window of sparse requests, on their way back to the pool."""

    def __init__(
        self,
        req_to_token: Tensor,
        allocator: Any,
        recent_tokens: int,
        kept: KeptTokens | None = None,
    ) -> None:
        """Free through SGLang's allocator the rows that its own table names.

        Args:
            req_to_token: SGLang's table.
            allocator: SGLang's.
            recent_tokens: newest tokens before the current one, which are not covered.
            kept: where dense layers keep tokens; None without any.
        """
        self._req_to_token = req_to_token
        self._allocator = allocator
        self._recent = recent_tokens
        self._kept = kept
        self._waiting: list[tuple[SparseSequence, int]] = []

    def note(self, sequence: SparseSequence, position: int) -> None:
        """A sparse request has made the step at `position`."""
        covered = position - self._recent
        if covered - sequence.request.cache_protected_len >= FREE_STRIDE:
            self._waiting.append((sequence, covered))

    def free(self) -> bool:
        """Free what was noted, on the stream that SGLang allocates on; whether there was any.

        The step that is being computed then may still read the old rows, which are not given out
        before the next one, or the new ones, which the table names only once they are written. The
        tokens were written in the steps before it, whose results the host has seen.
        """
        freed_any = False
        waiting, self._waiting = self._waiting, []
        for sequence, covered in waiting:
            request = sequence.request
            start = request.cache_protected_len
            if sequence.ended or sequence.orphaned or covered <= start:
                continue
            named = self._req_to_token[sequence.row, start:covered]
            pool_rows = named.to(torch.int64)
            if self._kept is not None:
                named.copy_(self._kept.keep(sequence, start, pool_rows))
            self._allocator.free(pool_rows)
            # SGLang frees from here on when the request ends.
            request.cache_protected_len = covered
            freed_any = True
        return freed_any
