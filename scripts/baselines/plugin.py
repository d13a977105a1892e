"""Registers the baselines with SGLang, beside the plugin of the cache rank."""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args

from scripts.baselines.args import BACKEND, BaselineServerArgs
from scripts.baselines.selection import QUEST_PAGE
from sglang_ext import processes

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
