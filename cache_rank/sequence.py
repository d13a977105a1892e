"""What the cache rank's host knows of one epoch; its tensors are in the selector's state."""

from __future__ import annotations

import dataclasses

from cache_rank.config import CacheRankConfig
from cache_rank.pages import ROLLBACK_TOKENS


@dataclasses.dataclass(slots=True)
class Sequence:
    """One incarnation of a request on the inference rank.

    Attributes:
        epoch: its number.
        slot: its place in the selector's state tensors.
        pages: that hold its K and V, in order.
        tokens: resident tokens.
        longest: most tokens that were ever resident.
        earlier_queries: in the query ring before its last step, at most W + 1: what the query of
            that step was predicted from.
        queries: of its newest tokens that are in the query ring, at most W + 1.
        used: slots of its working set in use in its last step.
        filled: slots in use once the answer to its last step is applied.
    """

    epoch: int
    slot: int
    pages: list[int] = dataclasses.field(default_factory=list)
    tokens: int = 0
    longest: int = 0
    earlier_queries: int = 0
    queries: int = 0
    used: int = 0
    filled: int = 0

    def extend(self, tokens: int) -> None:
        """Account for tokens that have come, `tokens` in all."""
        self.tokens = tokens
        self.longest = max(self.longest, tokens)

    def truncate(self, config: CacheRankConfig, tokens: int) -> None:
        """Account for tokens that are forgotten; `tokens` stay.

        Slots keep their tokens, which all stay: the newest recent tokens are in none. If fewer
        tokens are left to choose from than slots are in use, all slots are empty afterwards.

        Raises:
            ValueError: there are not so many, or too few: residencies, slots or the query ring may
                lack what they would need.
        """
        most = min(ROLLBACK_TOKENS, config.recent_tokens, config.query_window)
        least = max(0, self.longest - most)
        if not least <= tokens <= self.tokens:
            raise ValueError(
                f"epoch {self.epoch} cannot be truncated to {tokens} tokens: it holds "
                f"{self.tokens}, and its first {least} must stay (of the most it ever held all "
                f"but {ROLLBACK_TOKENS}, recent_tokens or query_window, whichever is least)"
            )
        self.queries = max(0, self.queries - (self.tokens - tokens))
        self.tokens = tokens
        if config.slots_wanted_after(tokens - 1) < self.filled:
            self.filled = 0

    def advance(self, config: CacheRankConfig, position: int) -> None:
        """Account for the step at `position`."""
        self.extend(position + 1)
        self.earlier_queries = self.queries
        self.queries = min(self.queries + 1, config.query_window + 1)
        self.used = self.filled
        self.filled = config.filled_after(position, self.filled)
