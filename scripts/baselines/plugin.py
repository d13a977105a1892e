"""Registers the baselines with SGLang, beside the plugin of the cache rank, or a rounded KV cache.

No engine for CPUs has an FP8 cache. What decode and later chunks of a prompt attend to is, rounded,
what such a cache on a GPU holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from scripts.baselines.args import BACKEND, BaselineServerArgs
from scripts.baselines.selection import QUEST_PAGE
from sglang_ext import processes

ROUNDED = {"fp8_e4m3": torch.float8_e4m3fn}

_backends: list[Any] = []
"""The decode backend of this process, when it has one."""


@functools.cache
def register() -> None:
    """Register with SGLang, before the cache rank's plugin is loaded, which applies all hooks."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(BACKEND)(_create_backend)
    HookRegistry.register(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        leave_room_for_bounds,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward", after_forward, HookType.AFTER
    )


def _create_backend(runner: Any) -> Any:
    from scripts.baselines.attention import BaselineAttnBackend

    _backends[:] = [BaselineAttnBackend(runner, runner.server_args)]
    return _backends[0]


def leave_room_for_bounds(available_bytes: int, *_: Any, **__: Any) -> int:
    """Take out of the pool's memory what Quest keeps: two keys for sixteen keys and values."""
    args = get_server_args()
    if not isinstance(args, BaselineServerArgs) or args.decode_mode != "quest":
        return available_bytes
    return available_bytes - -(-available_bytes // (QUEST_PAGE + 1))


def after_forward(result: Any, runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Let the backend see what prefills have written."""
    for backend in _backends if forward_batch.forward_mode.is_extend() else ():
        backend.on_extend(forward_batch)


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """Run SGLang's scheduler process with baselines."""
    register()
    return processes.run_scheduler_process(*args, **kwargs)


def run_rounding_scheduler_process(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run SGLang's scheduler process, on a CPU, with a KV cache rounded to such a dtype."""

    def write(
        original: Callable[..., Any],
        pool: Any,
        layer: Any,
        rows: Any,
        keys: Tensor,
        values: Tensor,
        *rest: Any,
        **others: Any,
    ) -> None:
        rounded = (part.to(ROUNDED[name]).to(part.dtype) for part in (keys, values))
        original(pool, layer, rows, *rounded, *rest, **others)

    target = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer"
    HookRegistry.register(target, write, HookType.AROUND)
    return processes.run_scheduler_process(*args, **kwargs)
