"""With `--inference-kv working-set`: pool rows of tokens that sparse layers do not need any more.

SGLang's table names one row of a token for all layers. When that row goes back to the pool, dense
layers keep the token in rows of their own, which the table names from then on: nobody else reads it
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cache_rank_kernels.scatter.reference import layer_buffers
from torch import Tensor

from cache_rank.operations import operations_for
from sglang_ext.lifecycle import SparseSequence

FREE_STRIDE = 64
"""Covered tokens are freed this many at a time: each time is some ten calls for the host."""


class KeptTokens:
    """Tokens without a pool row, in the kept rows of dense layers; see memory.py."""

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        first_block: int,
        block_rows: int,
        blocks: int,
        rows_a_block: int,
    ) -> None:
        """Describe the rows.

        Args:
            keys, values: per dense layer (rows, Hkv, D); the last `blocks * rows_a_block` rows are
                those to keep tokens in.
            first_block: first row of the reserve.
            block_rows: rows of a request in the reserve.
            blocks: in the reserve.
            rows_a_block: rows to keep tokens in, of each.
        """
        self._keys, self._values = layer_buffers(keys), layer_buffers(values)
        self._first_block, self._block_rows = first_block, block_rows
        self._first_row = keys[0].shape[0] - blocks * rows_a_block
        self._rows_a_block = rows_a_block
        self._copy_tokens = operations_for(keys[0].device).copy_tokens
        for count in (FREE_STRIDE, FREE_STRIDE + 1):  # so that no request waits for a compilation
            row = torch.zeros(count, dtype=torch.int64, device=keys[0].device)
            self._copy_tokens(self._keys, self._values, row, row)

    def rows_of(self, sequence: SparseSequence, start: int, stop: int) -> Tensor:
        """Where tokens of a request are kept: (stop - start,) int64."""
        block = (sequence.block - self._first_block) // self._block_rows
        first = self._first_row + block * self._rows_a_block
        return torch.arange(first + start, first + stop, device=self._keys.tensors[0].device)

    def keep(self, pool_rows: Tensor, kept_rows: Tensor) -> None:
        """Copy tokens between rows, (n,) int64 each, on the current stream."""
        self._copy_tokens(self._keys, self._values, pool_rows, kept_rows)


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

        The step that is being computed then may read the old rows, into which nothing is written
        before the next step, or the new ones, which the table names only once they hold the tokens.
        The tokens were written in the steps before it, whose results the host has seen.
        """
        named, pool_rows, kept_rows = [], [], []
        waiting, self._waiting = self._waiting, []
        for sequence, covered in waiting:
            request = sequence.request
            start = request.cache_protected_len
            if sequence.ended or sequence.orphaned or covered <= start:
                continue
            named.append(self._req_to_token[sequence.row, start:covered])
            pool_rows.append(named[-1].to(torch.int64))
            if self._kept is not None:
                kept_rows.append(self._kept.rows_of(sequence, start, covered))
            # SGLang frees from here on when the request ends.
            request.cache_protected_len = covered
        if not named:
            return False
        freed = torch.cat(pool_rows)
        if self._kept is not None:
            self._kept.keep(freed, torch.cat(kept_rows))
            for tokens, rows in zip(named, kept_rows, strict=True):
                tokens.copy_(rows)
        self._allocator.free(freed)
        return True
