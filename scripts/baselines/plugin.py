"""What a baseline, or a rounded KV cache, needs of SGLang: flags, an attention backend, hooks.

No engine for CPUs has an FP8 cache. What decode and later chunks of a prompt attend to is, rounded,
what such a cache on a GPU holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from scripts.baselines.selection import QUEST_PAGE
from sglang_ext import compat, processes, refusals
from sglang_ext.refusals import UnsupportedError, models, refuse, servers
from sglang_ext.server_args import CacheRankServerArgs

BACKEND = "baseline"
"""The name under which SGLang knows the decode attention backend."""

ROUNDED = {"fp8_e4m3": torch.float8_e4m3fn}

_backends: list[Any] = []
"""The decode backend of this process, when it has one."""


@compat.record
class BaselineServerArgs(CacheRankServerArgs):
    """SGLang's arguments, those of a working set, and the mode; there is no cache rank.

    There is no threshold: a request attends to everything while it has no more tokens than sinks,
    selected and recent ones add up to.
    """

    cache_rank_gpus: A[int, Arg(help="0: these modes select on the inference rank.")] = 0
    decode_mode: A[
        Literal["quest", "window", "tova", "oracle"], Arg(help="How sparse layers decode.")
    ] = "quest"

    def _resolve(self, let_sglang: Callable[[], None]) -> None:
        refusals.refuse_untested_sglang(self)
        if self.has_cache_rank:
            raise UnsupportedError("a baseline has no cache rank: pass --cache-rank-gpus 0.")
        if self.on_gpu and torch.cuda.get_device_capability()[0] not in (8, 9):
            raise UnsupportedError(
                "baselines attend by FlashAttention-3, which SGLang has from Ampere to Hopper."
            )
        refuse(self, servers.sparse_decode(self))
        refuse(self, refusals.of_flags(self, servers.EXCHANGE_FLAGS))
        servers.refuse_out_of_range(self)
        self._set("disable_radix_cache", True, "a baseline has to see every token prefilled")
        # SGLang's CPU engine has pages of one token.
        page = QUEST_PAGE if self.decode_mode == "quest" and self.on_gpu else 1
        self._set("page_size", page, "what is selected together")
        self._set_for_device()
        self._set("decode_attention_backend", BACKEND, "selection by the current query")
        let_sglang()
        refuse(self, models.sparse_decode(self))


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

    args = runner.server_args
    _backends[:] = [BaselineAttnBackend(runner, args, args.decode_mode)]
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
