"""Synchronous sparse attention in the same engine, to compare with: decode without a cache rank.

`--decode-mode` names one: `quest`, `window`, `tova` or `oracle`. Each selects on the inference rank
with the current query, before each layer's attention. Other modules use the names below, and no
others of this folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_ext.baselines.refusals import REFUSALS, page_size
from sglang_ext.baselines.selection import QUEST_PAGE
from sglang_ext.flags import CacheRankFlags

if TYPE_CHECKING:
    from sglang_ext.baselines.attention import BaselineAttnBackend

__all__ = [
    "FIELDS",
    "REFUSALS",
    "create_backend",
    "current",
    "memory_beside_pool",
    "page_size",
]

FIELDS = ("sparse_budget", "sink_tokens", "recent_tokens", "dense_layers")
"""The fields of the cache rank's flags that a baseline heeds, beside `decode_mode`."""

_current: BaselineAttnBackend | None = None


def create_backend(runner: Any, args: CacheRankFlags) -> BaselineAttnBackend:
    """Build this process's decode backend.

    Args:
        runner: SGLang's model runner, with its pools.
        args: the server's arguments, with one of these modes.
    """
    global _current
    from sglang_ext.baselines.attention import BaselineAttnBackend

    _current = BaselineAttnBackend(runner, args)
    return _current


def current() -> BaselineAttnBackend | None:
    """This process's decode backend, or None when it has none."""
    return _current


def memory_beside_pool(args: CacheRankFlags, available_bytes: int) -> int:
    """The bytes that a mode needs beside the KV pool, of those that both have together.

    Quest keeps the largest and smallest key of every page of 16: a sixteenth of keys and values.
    """
    return -(-available_bytes // (QUEST_PAGE + 1)) if args.decode_mode == "quest" else 0
