"""What a request leaves to SGLang's radix cache, from which later requests take their prefixes.

K and V of tokens from a request's first sparse step on come from attention to a working set. By
default only the tokens before them are offered to the tree: what it holds is what plain SGLang
would have computed, so that reuse changes no answer. With `--reuse-sparse-tokens on` all tokens
are, and requests that ask to stay dense have a part of the tree for themselves.

Prefill is dense, so what SGLang offers of requests that go on is reusable in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext import compat
from sglang_ext.lifecycle import asks_to_stay_dense

DENSE_NAMESPACE = "cache_rank: false"
"""Of requests that ask to stay dense."""

_NAMESPACE = "cache rank ["
"""Before the extra_key of a request that is kept apart, with why, and before what clients begin so:
else one could name a part of the tree that is not its own.
"""


def note_sparse(request: Any, position: int) -> None:
    """Note that a request turns sparse in the step at `position`; the first time counts."""
    if dense_tokens(request) is None:
        request.cache_rank_dense_tokens = position


def dense_tokens(request: Any) -> int | None:
    """How many of a request's tokens were computed densely; None is all of them."""
    return getattr(request, "cache_rank_dense_tokens", None)


def forget(request: Any) -> None:
    """Forget what was computed of a request: SGLang has taken its slot, and prefills it anew."""
    request.cache_rank_dense_tokens = request.cache_rank_page_keys = None


def separate(request: Any, sparse_tokens: bool, weight_updates: int) -> None:
    """Give a request a namespace in the tree, where it must not find what others have left there.

    Args:
        request: SGLang's Req, new.
        sparse_tokens: whether the tree is offered tokens that sparse steps have computed.
        weight_updates: how often other weights have been loaded.
    """
    apart = [DENSE_NAMESPACE] if sparse_tokens and asks_to_stay_dense(request) else []
    if weight_updates:
        apart.append(f"weights {weight_updates}")
    key = request.extra_key or ""
    if apart or key.startswith(_NAMESPACE):
        request.extra_key = f"{_NAMESPACE}{', '.join(apart)}] {key}"


def offer_dense_tokens(
    offer: Callable[..., None], tree: Any, request: Any, *, kv_len_to_handle: int
) -> None:
    """Offer the tree what was computed densely, and free the rows of all other tokens.

    Args:
        offer: RadixCache.cache_finished_req.
        tree: the RadixCache.
        request: SGLang's Req, which ends.
        kv_len_to_handle: how many of its tokens are in the pool.
    """
    dense = dense_tokens(request)
    if dense is None or dense >= kv_len_to_handle:
        return offer(tree, request, True, kv_len_to_handle=kv_len_to_handle)
    _free_rows(tree, request, dense, kv_len_to_handle)
    return offer(tree, request, True, kv_len_to_handle=dense)


def offer_nothing(
    offer: Callable[..., None], tree: Any, request: Any, *, kv_len_to_handle: int
) -> None:
    """Free the rows of a request of which nothing is offered, as of one that is retracted.

    The tree frees those of tokens that the request has. There are more when steps were taken back:
    what they have written is in the pool, but their tokens were not used.

    Args:
        offer, tree, request, kv_len_to_handle: as above.
    """
    known = len(request.origin_input_ids) + len(request.output_ids)
    if known < kv_len_to_handle:
        _free_rows(tree, request, known, kv_len_to_handle)
    return offer(tree, request, False, kv_len_to_handle=min(known, kv_len_to_handle))


def _free_rows(tree: Any, request: Any, start: int, stop: int) -> None:
    table = tree.req_to_token_pool.req_to_token
    tree.token_to_kv_pool_allocator.free(table[compat.pool_state(request).req_pool_idx, start:stop])
