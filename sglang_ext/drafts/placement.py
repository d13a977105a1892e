"""What selects for drafts: SGLang's own process, or a cache rank."""

from __future__ import annotations

from sglang_ext import inference_rank
from sglang_ext.inference_rank import InferenceRank
from sglang_ext.inline import starting
from sglang_ext.inline.rank import InlineRank

DraftingRank = InlineRank | InferenceRank
"""What a round asks: both have the methods of a round, under one name each."""


def current() -> DraftingRank | None:
    """What selects in this process, or has a cache rank select; None where nothing does."""
    return starting.current() or inference_rank.current()
