"""Pages of prompts come back from the cache rank into SGLang's pool.

The cache rank keeps complete pages of prompts by name. SGLang's pool may not have them any more:
with `working-set` rows of sparse requests leave it, and the radix cache is off; with `full` the
radix cache evicts. To SGLang's scheduler these pages are a part of the prefix that lies on the
host, as those of its own hierarchical cache: it puts what comes back behind what the radix cache
has, and prefills the rest. The rows are the request's own, as those that it computes.

The scheduler waits until all pages are there, which takes a small part of the prefill that they
replace. A cache rank that is lost meanwhile costs the prefill: nothing is written into rows that
have been given back, since pages are put there by the thread that waits.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from torch import Tensor

from cache_rank.pages import PAGE_TOKENS
from sglang_ext import compat
from sglang_ext.request_state import asks_to_stay_dense
from sglang_ext.two_ranks.first_layer import FirstLayer
from sglang_ext.two_ranks.lifecycle import Lifecycle
from sglang_ext.two_ranks.recovery import CacheRankClient


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

    def match(self, request: Any, cached: int, most: int) -> int:
        """Say how many tokens of a request can be restored.

        Args:
            cached: its first tokens that the radix cache has.
            most: how many of its first tokens may be had.
        """
        request.cache_rank_restored = None
        if most - cached < PAGE_TOKENS:  # less is computed sooner
            return 0
        first = cached // PAGE_TOKENS
        gained = PAGE_TOKENS * (first + len(self._names(request, first, most))) - cached
        return gained if gained >= PAGE_TOKENS else 0

    def restore(self, tree: Any, request: Any, tokens: int) -> Tensor | None:
        """Restore as many tokens as were matched, behind those that the radix cache has.

        Returns:
            Their pool rows, (tokens,) int64; None if there is no room, or no cache rank any more.
        """
        cached = compat.prefix_tokens(request)
        first = cached // PAGE_TOKENS
        names = self._names(request, first, cached + tokens)
        rows: Tensor | None = None
        if PAGE_TOKENS * (first + len(names)) == cached + tokens:
            evict_from_tree_cache(tree, tokens)
            rows = self._allocator.alloc(tokens)
        if rows is not None and not self._take_back(names, rows):
            self._allocator.free(rows)
            rows = None
        if rows is None:
            request.host_hit_length = 0
        elif self._first_layer is not None:
            prompt = [*request.origin_input_ids, *request.output_ids]
            self._first_layer.write(prompt, rows, cached)
        request.cache_rank_restored = rows
        return rows

    def _take_back(self, names: list[int], rows: Tensor) -> bool:
        """Wait for pages of these names, which end with these rows; whether they came."""
        self._cache_rank.call(lambda exchange: exchange.restore(names, rows, self.forward_stream))
        return self._cache_rank.exchange is not None

    def settle(self, request: Any, is_admitted: bool) -> None:
        """Let a request own what was restored for it, or give it back if SGLang does not begin."""
        if request.cache_rank_restored is None:
            return
        # Rows from here on are the request's own; SGLang takes all for the radix cache's.
        cached = compat.prefix_tokens(request) - len(request.cache_rank_restored)
        compat.pool_state(request).cache_protected_len = cached
        if not is_admitted:
            self._allocator.free(request.cache_rank_restored)
            request.cache_rank_restored = None

    def _names(self, request: Any, first: int, most: int) -> list[int]:
        """The names of a request's pages, from the first wanted one on, within `most` tokens."""
        prompts = self._lifecycle.prompts
        by_other_weights = request.cache_rank_weights != self._lifecycle.weight_updates
        if prompts is None or self._cache_rank.exchange is None or by_other_weights:
            return []
        if asks_to_stay_dense(request) and not self._is_exact:
            return []
        return prompts.names_of(request, most // PAGE_TOKENS, first)
