"""Tokens leave SGLang's pool once the cache rank has them, with `--inference-kv working-set`.

Sparse layers do not need the pool rows of a sparse request's tokens before its recent window.
SGLang's table names one row of a token for all layers. When that row goes back to the pool, dense
layers hold the token in rows of their own, which the table names from then on: nobody else reads it
there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.kernels.scatter import copy_tokens
from cache_rank.kernels.scatter.reference import layer_buffers
from sglang_ext import compat
from sglang_ext.flags import CacheRankFlags
from sglang_ext.memory import dense_store_rows, dense_store_rows_per_request, reserve_block_rows
from sglang_ext.pools import Pools, first_reserve_row
from sglang_ext.two_ranks.lifecycle import SparseSequence

EVICTION_STRIDE = 64
"""Tokens of a request are evicted this many at a time: each time is some ten calls for the host."""


class DenseStore:
    """Rows in which dense layers hold tokens that have no pool row any more; see memory.py."""

    def __init__(self, args: CacheRankFlags, pools: Pools) -> None:
        self._keys = layer_buffers(pools.keys[: args.dense_layers])
        self._values = layer_buffers(pools.values[: args.dense_layers])
        self._first_block = first_reserve_row(pools, args)
        self._block_rows = reserve_block_rows(args)
        self._rows_per_request = dense_store_rows_per_request(args)
        self._first_row = pools.keys[0].shape[0] - dense_store_rows(args)
        row = torch.zeros(1, dtype=torch.int64, device=pools.keys[0].device)
        self.copy(row, row)  # so that no request waits to compile

    def rows_of(self, sequence: SparseSequence, start: int, stop: int) -> Tensor:
        """Return the rows of a request's tokens from start to stop: (stop - start,) int64."""
        block = (sequence.block - self._first_block) // self._block_rows
        first = self._first_row + block * self._rows_per_request
        return torch.arange(first + start, first + stop, device=self._keys.tensors[0].device)

    def copy(self, pool_rows: Tensor, store_rows: Tensor) -> None:
        """Copy tokens from pool rows into the store, (n,) int64 each, on the current stream."""
        copy_tokens(self._keys, self._values, pool_rows, store_rows)


class Eviction:
    """Takes tokens before the recent window of sparse requests out of SGLang's pool."""

    def __init__(self, args: CacheRankFlags, pools: Pools) -> None:
        self._req_to_token, self._allocator = pools.req_to_token, pools.allocator
        self._recent = args.recent_tokens
        self._dense_store = DenseStore(args, pools) if args.dense_layers else None
        self._waiting: list[tuple[SparseSequence, int]] = []

    def note(self, sequence: SparseSequence, position: int) -> None:
        """Note that a sparse request has made the step at `position`."""
        stop = position - self._recent
        if stop - compat.pool_state(sequence.request).cache_protected_len >= EVICTION_STRIDE:
            self._waiting.append((sequence, stop))

    def evict(self) -> bool:
        """Free what was noted, on the stream that SGLang allocates on; whether there was any.

        The step that is being computed then may read the old rows, into which nothing is written
        before the next step, or the new ones, which the table names only once they hold the tokens.
        The tokens were written in the steps before it, whose results the host has seen.
        """
        named, pool_rows, store_rows = [], [], []
        waiting, self._waiting = self._waiting, []
        for sequence, stop in waiting:
            state = compat.pool_state(sequence.request)
            start = state.cache_protected_len
            if sequence.ended or sequence.orphaned or stop <= start:
                continue
            named.append(self._req_to_token[sequence.row, start:stop])
            pool_rows.append(named[-1].to(torch.int64))
            if self._dense_store is not None:
                store_rows.append(self._dense_store.rows_of(sequence, start, stop))
            state.cache_protected_len = stop  # where SGLang begins to free when the request ends
        if not named:
            return False
        freed = torch.cat(pool_rows)
        if self._dense_store is not None:
            self._dense_store.copy(freed, torch.cat(store_rows))
            for tokens, rows in zip(named, store_rows, strict=True):
                tokens.copy_(rows)
        self._allocator.free(freed)
        return True
