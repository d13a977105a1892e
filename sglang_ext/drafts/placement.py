"""What selects for drafts: SGLang's own process, or a cache rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sglang_ext import inference_rank
from sglang_ext.inference_rank import InferenceRank
from sglang_ext.inline import starting
from sglang_ext.inline.rank import InlineRank

Result = TypeVar("Result")


class DraftingRank(Protocol):
    """What a round asks of it; lengths are those of requests, their current tokens included."""

    def draft_backend(self, runner: Any) -> Any:
        """The attention backend of decode steps, for whose graphs it may be captured.

        Args:
            runner: SGLang's, which verifies by the backend that it has.
        """

    def plan_drafts(self, requests: list[Any], lengths: list[int]) -> int:
        """Begin a round, and decide how many drafts it has; 0 is dense steps."""

    def run_draft(
        self, requests: list[Any], lengths: list[int], forward: Callable[[], Result]
    ) -> Result:
        """Run a step of a round that drafts."""

    def run_dense(
        self, requests: list[Any], lengths: list[int], forward: Callable[[], Result]
    ) -> Result:
        """Run a step of a round that does not."""

    def on_verified(self, accepted: list[int], drafts: int) -> None:
        """Note how many drafts of each request were right."""

    def statistics_of(self, requests: list[Any]) -> list[tuple[int | str | None, ...]]:
        """What responses report, one entry a request."""


def current() -> InlineRank | InferenceRank | None:
    """What selects in this process, or has a cache rank select; None where nothing does."""
    return starting.current() or inference_rank.current()
