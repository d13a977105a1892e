"""The hooks of SGLang's KV pool: rows of our own behind those that its allocator hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.plugins.hook_registry import HookType

from cache_rank.config import ModelShape
from sglang_ext import compat
from sglang_ext.hook import Hook, sparse_args
from sglang_ext.inline.selection import bytes_beside_sketches
from sglang_ext.memory import (
    bytes_beyond_allocator,
    dense_store_rows,
    message_bytes,
    reserve_rows,
)
from sglang_ext.refusals import UnsupportedError
from sglang_ext.server_args import CacheRankServerArgs


def _cache_rank_args() -> CacheRankServerArgs | None:
    args = sparse_args()
    return args if args is not None and args.has_cache_rank else None


def add_reserve_rows(shapes: tuple[Any, Any], pool: Any) -> tuple[Any, Any]:
    """Append the reserve to the K and V buffers of the pool; its nominal size stays as it is."""
    args = _cache_rank_args()
    if args is None:
        return shapes
    extra = reserve_rows(args)
    keys, values = shapes
    return (keys[0] + extra, *keys[1:]), (values[0] + extra, *values[1:])


def describe_rows_of_the_allocator(original: Callable[..., Any], pool: Any) -> Any:
    """Describe the buffers of the pool to SGLang without our rows behind them."""
    if _cache_rank_args() is None:
        return original(pool)
    keys, values = pool.k_buffer, pool.v_buffer
    rows = pool.size + pool.page_size
    pool.k_buffer, pool.v_buffer = ([b[:rows] for b in buffers] for buffers in (keys, values))
    try:
        return original(pool)
    finally:
        pool.k_buffer, pool.v_buffer = keys, values


def add_dense_store(result: None, pool: Any) -> None:
    """Give dense layers rows for the tokens whose pool rows are freed."""
    args = _cache_rank_args()
    if args is None or not (extra := dense_store_rows(args)):
        return
    rows, *shape = pool.k_buffer[0].shape
    for buffers in (pool.k_buffer, pool.v_buffer):
        buffers[: args.dense_layers] = [None] * args.dense_layers
    if torch.device(pool.device).type == "cuda":
        torch.cuda.empty_cache()  # there is no room for the old and the new buffers
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
        for layer in range(args.dense_layers):
            # As 0.5.23 makes them: some of its kernels look for V behind K.
            pool.k_buffer[layer], pool.v_buffer[layer] = torch.zeros(
                (2, rows + extra, *shape), dtype=pool.store_dtype, device=pool.device
            )


def leave_room_beyond_allocator(available_bytes: int, configurator: Any, *_: Any, **__: Any) -> int:
    """Take our rows beyond the allocator and messages out of the pool's share."""
    args = sparse_args()
    if args is None:
        return available_bytes
    model = configurator.model_config
    layers, dtype = configurator.layer_info.num_effective_layers, configurator.kv_cache_dtype
    if args.is_inline:
        return bytes_beside_sketches(args, available_bytes, layers, dtype, model)
    shape = ModelShape(
        layers - args.dense_layers,
        model.num_attention_heads // args.tp_size,
        model.get_num_kv_heads(args.tp_size),
        model.head_dim,
        str(dtype).removeprefix("torch."),
        scale=1.0,
        hidden_size=model.hidden_size,
    )
    token = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    taken = bytes_beyond_allocator(args, layers, token) + message_bytes(args, shape)
    if taken >= available_bytes:
        raise UnsupportedError(
            f"--max-sparse-requests {args.max_sparse_requests} leaves no memory for SGLang's pool: "
            f"working sets, messages and what dense layers keep take {taken / 1e9:.1f} of "
            f"{available_bytes / 1e9:.1f} GB; lower it, or --sparse-budget, --max-swap-tokens, or, "
            "with --inference-kv working-set, --context-length or --dense-layers."
        )
    return available_bytes - taken


POOL_HOOKS = (
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._kv_buffer_shapes",
        HookType.AFTER,
        add_reserve_rows,
        "working sets live in rows that the allocator never hands out",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
        HookType.AFTER,
        add_dense_store,
        "dense layers keep tokens that lose their pool rows",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._build_kv_buffer_descs",
        HookType.AROUND,
        describe_rows_of_the_allocator,
        "from 0.5.23 on; it checks that the buffers are the allocator's",
        compat.DESCRIBES_BUFFERS,
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        HookType.AFTER,
        leave_room_beyond_allocator,
        "what is behind the pool is part of the same memory",
    ),
)
