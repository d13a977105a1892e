"""Synchronous sparse attention in the same engine, to compare with: decode without a cache rank.

`--decode-mode` names one: `quest`, `window`, `tova` or `oracle`. Whatever a mode selects, it
selects on the inference rank from the current query, before each layer's attention.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.baselines.selection import QUEST_PAGE

_current: Any = None


def create_backend(runner: Any, args: Any) -> Any:
    """Build this process's decode backend, a BaselineAttnBackend.

    Args:
        runner: SGLang's model runner, with its pools.
        args: a CacheRankServerArgs with one of these modes.
    """
    global _current
    from sglang_ext.baselines.attention import BaselineAttnBackend

    _current = BaselineAttnBackend(runner, args)
    return _current


def current() -> Any:
    """This process's BaselineAttnBackend, or None when it has none."""
    return _current


def memory_beside_pool(args: Any, available_bytes: int) -> int:
    """Of the memory for the KV pool, the bytes that a mode needs beside it.

    Quest keeps the largest and smallest key of every page of 16: a sixteenth of keys and values.
    """
    return -(-available_bytes // (QUEST_PAGE + 1)) if args.decode_mode == "quest" else 0
