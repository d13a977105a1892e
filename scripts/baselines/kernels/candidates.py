"""Candidates of a row, and how programs divide them, Triton.

Candidates are the tokens, or pages, between the sinks and the newest tokens; see `Budget`.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 64
"""A program takes this many tokens or pages at a time."""

_TARGET_PROGRAMS = 528
"""Four programs for each multiprocessor of an H200."""

_MAX_SPLITS = 64
"""At most this many programs share a unit."""


def count_splits(units: int, blocks: int) -> int:
    """How many programs share one unit's blocks: a power of two that fills the GPU."""
    wanted = triton.next_power_of_2(triton.cdiv(_TARGET_PROGRAMS, units))
    return int(max(1, min(wanted, _MAX_SPLITS, triton.next_power_of_2(blocks))))


@triton.jit
def first_recent(length, sinks, recent, PAGE_TOKENS: tl.constexpr):
    """The first token after the candidates; see `Budget.recent_start_of`."""
    wanted = tl.maximum(length - 1 - recent, 0) // PAGE_TOKENS * PAGE_TOKENS
    return tl.maximum(wanted, tl.minimum(sinks, length))


@triton.jit
def must_choose(length, sinks, recent, selected, PAGE_TOKENS: tl.constexpr):
    """Whether there are more candidates than are selected."""
    start = first_recent(length, sinks, recent, PAGE_TOKENS)
    return start - tl.minimum(sinks, length) > selected
