"""K and V of a server on a CPU, rounded as an FP8 cache would: no engine for CPUs has one.

What decode and later chunks of a prompt attend to is then what an FP8 cache on a GPU holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from sglang_ext import processes

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn}


def run_scheduler_process(name: str, *args: Any, **kwargs: Any) -> Any:
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
        rounded = (part.to(DTYPES[name]).to(part.dtype) for part in (keys, values))
        original(pool, layer, rows, *rounded, *rest, **others)

    target = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer"
    HookRegistry.register(target, write, HookType.AROUND)
    return processes.run_scheduler_process(*args, **kwargs)
