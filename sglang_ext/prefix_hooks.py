"""The hooks of SGLang's prefix cache, and of what begins a request with what there is of it.

A prompt comes back from the cache rank in this order:

    find_prefix      the scheduler asks what there is of a request; `host_hit_length` are tokens
                     that can come back
    admit_request    it decides whether the request begins now, and asks for them if so:
    load_back        they come into rows of the pool, `cache_rank_restored`, or none do
    restored_rows    in 0.5.23 it asks for the rows of the prefix
    settle           in `admit_request`: the rows are the request's own, or given back

A request begins if there is room in the pool for it and for what others are still to write there.
With `--inference-kv working-set` a sparse request frees as many rows as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_ext import compat, reuse
from sglang_ext.hook import Hook, sparse_args
from sglang_ext.two_ranks import inference_rank
from sglang_ext.two_ranks.eviction import EVICTION_STRIDE
from sglang_ext.two_ranks.lifecycle import Phase


def find_prefix(result: Any, tree: Any, params: Any, *_: Any, **__: Any) -> Any:
    """Tell SGLang of the pages of a prompt that the cache rank has."""
    rank = inference_rank.current()
    if rank is None or rank.restoring is None or params.req is None:
        return result
    cached = compat.matched_tokens(result)
    tokens = rank.restoring.match(params.req, cached, len(params.key))
    return result._replace(host_hit_length=tokens) if tokens else result


def admit_request(
    original: Callable[..., Any], adder: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Begin a request with what is restored of it, which then is its own."""
    rank = inference_rank.current()
    restoring = None if rank is None or not request.host_hit_length else rank.restoring
    if rank is None or (restoring is None and rank.eviction is None):
        return original(adder, request, *args, **kwargs)
    if adder.rem_chunk_tokens is not None and adder.rem_chunk_tokens <= 0:
        request.host_hit_length = 0  # SGLang loads before it sees that the request cannot begin
    params = request.sampling_params
    # Else, without a radix cache, nothing is loaded back, and there must be room for whole answers.
    ignores_eos, params.ignore_eos = params.ignore_eos, False
    try:
        result = original(adder, request, *args, **kwargs)
    finally:
        params.ignore_eos = ignores_eos
    if restoring is not None:
        restoring.settle(request, request in adder.can_run_list)
    return result


def tokens_to_come(tokens: float, adder: Any, request: Any) -> float:
    """Say how many more rows of the pool a running request may take."""
    rank = inference_rank.current()
    if rank is None or rank.eviction is None:
        return tokens
    sequence = rank.lifecycle.live.get(compat.pool_state(request).req_pool_idx)
    is_sparse = sequence is not None and sequence.phase is Phase.SPARSE
    return min(tokens, EVICTION_STRIDE) if is_sparse else tokens


def load_back(
    original: Callable[..., Any], tree: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Restore what the cache rank has of a prompt."""
    rank = inference_rank.current()
    if rank is None or rank.restoring is None:
        return original(tree, params, *args, **kwargs)
    rows = rank.restoring.restore(tree, params.req, params.host_hit_length)
    return compat.loaded_back(params.req, rows)


def restored_rows(original: Callable[..., Any], tree: Any, request: Any) -> Any:
    """Return the rows of a prefix, with those of what was restored, which are in no tree."""
    rows = getattr(request, "cache_rank_restored", None)
    if rows is None:
        return original(tree, request)
    tokens = request.prefix_len
    request.prefix_len -= len(rows)
    try:
        return torch.cat((original(tree, request).to(rows.device), rows))
    finally:
        request.prefix_len = tokens


def insert_prefix(
    original: Callable[..., None], tree: Any, request: Any, *args: Any, **kwargs: Any
) -> None:
    """Insert what may be reused of a request into the radix cache, and have the rest freed."""
    ours = sparse_args()
    if ours is None or tree.disable:
        return original(tree, request, *args, **kwargs)
    most = None if ours.reuse_sparse_tokens == "on" else reuse.dense_tokens(request)
    return compat.insert_tokens(original, tree, request, most, *args, **kwargs)


def _hooks_of(prefix_cache: str) -> tuple[Hook, ...]:
    return (
        Hook(
            f"{prefix_cache}.match_prefix",
            HookType.AFTER,
            find_prefix,
            "the scheduler counts on what it finds, in the pool or on the host",
        ),
        Hook(
            f"{prefix_cache}.init_load_back",
            HookType.AROUND,
            load_back,
            "what a request has on the host is loaded when it begins",
        ),
        Hook(
            f"{prefix_cache}.prefix_device_indices",
            HookType.AROUND,
            restored_rows,
            "in 0.5.23; the rows of a prefix are read off the tree",
            compat.ASKS_FOR_ROWS,
        ),
    )


PREFIX_HOOKS = (
    *(hook for prefix_cache in compat.PREFIX_CACHES for hook in _hooks_of(prefix_cache)),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        HookType.AROUND,
        admit_request,
        "decides whether a request begins, and takes what was loaded for the tree's",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset",
        HookType.AFTER,
        tokens_to_come,
        "rows are kept free for what running requests are to write",
    ),
    Hook(
        compat.INSERT_PREFIX,
        HookType.AROUND,
        insert_prefix,
        "what sparse steps wrote must not be reused as if it were dense",
    ),
)
