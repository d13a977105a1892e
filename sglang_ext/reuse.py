"""What a request leaves to SGLang's radix cache, from which later requests take their prefixes.

K and V of tokens from a request's first sparse step on come from attention to a working set. By
default only the tokens before them are offered to the tree: what it holds is what plain SGLang
would have computed, so that reuse changes no answer. With `--reuse-sparse-tokens on` all tokens
are, and requests that ask to stay dense have a part of the tree for themselves.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.compat import pool_state
from sglang_ext.flags import WIRE_CODES
from sglang_ext.request_state import asks_to_stay_dense

DENSE_NAMESPACE = "cache_rank: false"
"""Of requests that ask to stay dense."""

_NAMESPACE = "cache rank ["
"""A namespace begins so, and goes on with the reason. It stands before a request's extra_key. An
extra_key of a client that begins so gets one too: else it could name a part of the tree that is not
the client's own.
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
    request.cache_rank_dense_tokens = request.cache_rank_restored = None


def set_namespace(request: Any, sparse_tokens: bool, weight_updates: int) -> None:
    """Give a request a namespace in the tree, where it must not find what others have left there.

    It keeps the namespace while it has a slot, so that what it goes on computing by other weights
    stays where nobody begins any more.

    Args:
        sparse_tokens: whether the tree is offered tokens that sparse steps have computed.
    """
    if pool_state(request).req_pool_idx is not None:
        return
    apart = [DENSE_NAMESPACE] if sparse_tokens and asks_to_stay_dense(request) else []
    if weight_updates:
        apart.append(f"weights {weight_updates}")
    custom = request.sampling_params.custom_params
    if isinstance(custom, dict) and WIRE_CODES in custom:  # each rounds its own way
        apart.append(f"{WIRE_CODES} {custom[WIRE_CODES]}")
    before = getattr(request, "cache_rank_namespace", "")
    key = (request.extra_key or "").removeprefix(before)
    namespace = f"{_NAMESPACE}{', '.join(apart)}] " if apart or key.startswith(_NAMESPACE) else ""
    if namespace != before:
        request.extra_key = namespace + key
    request.cache_rank_namespace, request.cache_rank_weights = namespace, weight_updates
