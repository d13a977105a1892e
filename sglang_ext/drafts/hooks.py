"""The hooks that drafts need; those of selection are in `sglang_ext/hooks.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.plugins.hook_registry import HookType

from sglang_ext import compat
from sglang_ext.drafts import noise
from sglang_ext.drafts.forwards import verify_input
from sglang_ext.hook import DECODE_GRAPHS, Hook, sparse_args, verifies


def prepare_moves(original: Callable[..., None], pool: Any) -> None:
    """Prepare the pool to move the rows of drafts, of which a chain moves none."""
    args = sparse_args()
    if args is None or not args.has_drafts:
        return original(pool)
    pool._kv_copy_config = None


def round_draft_weights(result: None, runner: Any) -> None:
    """Round the model's weights for drafts, before what is left of memory is shared out."""
    args = sparse_args()
    if args is None or not args.rounds_draft_weights:
        return
    # Imported here: it brings SGLang's layers, which only a process with a model needs.
    from sglang_ext.inline.draft_weights import DraftWeights

    is_kept = bool(args.enable_weights_cpu_backup)
    with runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=is_kept):
        runner.cache_rank_draft_weights = DraftWeights(runner.model)


def find_drafts_pool(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Find the KV pool of drafts, which have none of their own."""
    args = sparse_args()
    return None if args is not None and args.has_drafts else original(**kwargs)


def widen_table(
    original: Callable[..., None], table: Any, *args: Any, max_context_len: int, **kwargs: Any
) -> None:
    """Make the table of requests wide enough for the rows that drafts may take.

    SGLang takes rows for two rounds behind a request, and its table has columns for one and four
    tokens more. At the end of the context the rest would go to the request of the next slot.
    """
    ours = sparse_args()
    if ours is not None and ours.has_drafts:
        max_context_len += int(ours.speculative_num_draft_tokens)
    original(table, *args, max_context_len=max_context_len, **kwargs)


def assign_rows(
    original: Callable[..., None],
    slots: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    rows: torch.Tensor,
    requests: int,
) -> None:
    """Write pool rows that drafts may take into the table of requests."""
    if table.is_cuda:
        return original(slots, table, starts, ends, rows, requests)
    first = 0
    for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[slot, start:end] = rows[first : first + end - start].to(table.dtype)
        first += end - start


def hash_noise(original: Callable[..., Any], seeds: Any, positions: Any, columns: Any) -> Any:
    """Hash what noise depends on that draws tokens by a seed."""
    on_cpu = seeds.device.type == "cpu"
    return (noise.murmur_hash32 if on_cpu else original)(seeds, positions, columns)


def describe_verification(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """Say what attention reads of the drafts in a verification that is captured."""
    args = sparse_args()
    if result is not None or args is None or not verifies(runner):
        return result
    return verify_input(None, None, runner.captured_req_width)


DRAFT_HOOKS = (
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        HookType.AFTER,
        round_draft_weights,
        "the KV pool gets what is left of memory behind it",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        HookType.AROUND,
        prepare_moves,
        "drafts are a chain, and the kernel that it runs is missing on CPUs",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool",
        HookType.AROUND,
        find_drafts_pool,
        "in 0.5.16; it takes each speculative algorithm for one with a model",
        compat.ASKS_FOR_DRAFTS_POOL,
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__",
        HookType.AROUND,
        widen_table,
        "a request that is as long as can be must not write to another's rows",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        HookType.AROUND,
        assign_rows,
        "its kernel is missing on CPUs",
    ),
    Hook(
        "sglang.srt.layers.sampler.murmur_hash32",
        HookType.AROUND,
        hash_noise,
        "its kernel is missing on CPUs",
    ),
    Hook(
        f"{DECODE_GRAPHS}.get_spec_info",
        HookType.AFTER,
        describe_verification,
        "it knows the speculative algorithms of SGLang only",
    ),
)
