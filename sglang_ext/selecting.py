"""Who selects in this process: it does so inline, or a cache rank does."""

from __future__ import annotations

from sglang_ext.inline import starting
from sglang_ext.inline.rank import InlineRank
from sglang_ext.two_ranks import inference_rank
from sglang_ext.two_ranks.inference_rank import InferenceRank

SelectingRank = InlineRank | InferenceRank
"""Hooks and rounds of drafts call either of these, whose methods have the same names."""


def rank() -> SelectingRank | None:
    """Return who selects; None where nothing does."""
    return starting.current() or inference_rank.current()
