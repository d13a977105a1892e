"""Pages of prompts come back from the cache rank into SGLang's pool, with `working-set`.

SGLang's radix cache is off there, since rows of sparse requests leave the pool. But the cache rank
keeps complete pages of prompts by name. To SGLang's scheduler these are a prefix that lies on the
host, as those of its own hierarchical cache: it takes what comes back as the request's prefix, and
prefills the rest. The rows are the request's alone, and are freed with its others.

The scheduler waits until all pages are there, which takes a small part of the prefill that they
replace. A cache rank that is lost meanwhile costs the prefill: nothing is written into rows that
have been given back, since pages are put there by the thread that waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cache_rank.pages import PAGE_TOKENS
from sglang_ext import compat
from sglang_ext.first_layer import FirstLayer
from sglang_ext.lifecycle import Lifecycle, asks_to_stay_dense
from sglang_ext.recovery import CacheRankClient


class Restoring:
    """Restores the prompts of one inference rank.

    Attributes:
        forward_stream: on a GPU the stream of the last forward pass; None before the first.
    """

    def __init__(
        self,
        cache_rank: CacheRankClient,
        lifecycle: Lifecycle,
        allocator: Any,
        first_layer: FirstLayer | None,
        is_exact: bool,
    ) -> None:
        """Restore from a cache rank.

        Args:
            first_layer: writes what the cache rank does not hold; None where it holds all layers.
            is_exact: whether tokens come back as they were shipped.
        """
        self.forward_stream: torch.cuda.Stream | None = None
        self._cache_rank = cache_rank
        self._lifecycle = lifecycle
        self._allocator = allocator
        self._first_layer = first_layer
        self._is_exact = is_exact

    def match(self, request: Any, most: int) -> int:
        """Say how many first tokens of a request, `most` at most, can be restored."""
        request.cache_rank_restored = None
        return PAGE_TOKENS * len(self._names(request, most))

    def restore(self, request: Any, tokens: int) -> Tensor | None:
        """Restore the first tokens of a request, as many as were matched.

        Returns:
            Their pool rows, (tokens,) int64; None if there is no room, or no cache rank any more.
        """
        names = self._names(request, tokens)
        rows: Tensor | None = None
        if PAGE_TOKENS * len(names) == tokens:
            rows = self._allocator.alloc(tokens)
        if rows is not None and not self._take_back(names, rows):
            self._allocator.free(rows)
            rows = None
        if rows is None:
            request.host_hit_length = 0
        elif self._first_layer is not None:
            self._first_layer.write([*request.origin_input_ids, *request.output_ids], rows)
        request.cache_rank_restored = rows
        return rows

    def _take_back(self, names: list[int], rows: Tensor) -> bool:
        """Wait for pages of these names; whether they came."""
        self._cache_rank.call(lambda exchange: exchange.restore(names, rows, self.forward_stream))
        return self._cache_rank.exchange is not None

    def settle(self, request: Any, is_admitted: bool) -> None:
        """Let a request own what was restored for it, or give it back if SGLang does not begin."""
        if request.cache_rank_restored is None:
            return
        # Rows from here on are the request's own; SGLang takes those before for the radix cache's.
        compat.pool_state(request).cache_protected_len = 0
        if not is_admitted:
            self._allocator.free(request.cache_rank_restored)
            request.cache_rank_restored = None

    def _names(self, request: Any, most: int) -> list[int]:
        prompts = self._lifecycle.prompts
        by_other_weights = request.cache_rank_weights != self._lifecycle.weight_updates
        if prompts is None or self._cache_rank.exchange is None or by_other_weights:
            return []
        if asks_to_stay_dense(request) and not self._is_exact:
            return []
        return prompts.names_of(request, most // PAGE_TOKENS)
