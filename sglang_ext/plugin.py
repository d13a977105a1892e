"""The plugin's entry point, which registers our attention backend and hooks with SGLang.

SGLang logs the error of a plugin and goes on without it. Whoever needs ours calls `assert_live`.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def register() -> None:
    """Register with SGLang, in every process that loads plugins."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_ext.disaggregation import names
    from sglang_ext.drafts import algorithm
    from sglang_ext.flags import BACKEND, PREFILL_BACKEND
    from sglang_ext.hooks import HOOKS, add_calls

    register_attention_backend(BACKEND)(_create_backend)
    register_attention_backend(PREFILL_BACKEND)(_create_backend)
    algorithm.register()
    names.register()
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    add_calls()


def assert_live() -> None:
    """Check that every hook is in place.

    Raises:
        RuntimeError: some are not, which SGLang has only logged; the message names them.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_ext.hooks import HOOKS

    HookRegistry.apply_hooks()
    missing = [hook.target for hook in HOOKS if hook.target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"the cache rank's hooks could not be applied: {', '.join(missing)}")


def _create_backend(runner: Any) -> Any:
    from sglang_ext.inline import starting
    from sglang_ext.server_args import CacheRankServerArgs
    from sglang_ext.two_ranks import inference_rank
    from sglang_ext.two_ranks.attention import CacheRankAttnBackend

    if not isinstance(runner.server_args, CacheRankServerArgs):
        raise RuntimeError(
            "the attention backend cache_rank needs a cache rank: "
            "start the server with python -m sglang_ext.launch"
        )
    if runner.server_args.is_inline:
        return starting.create_backend(runner, runner.server_args)
    return CacheRankAttnBackend(runner, inference_rank.create(runner, runner.server_args))
