"""What the cache rank's host knows of one epoch; its tensors are in the selector's state."""

from __future__ import annotations

import dataclasses

from cache_rank.config import CacheRankConfig


@dataclasses.dataclass(slots=True)
class Sequence:
    """One incarnation of a request on the inference rank.

    Attributes:
        epoch: its number.
        slot: its place in the selector's state tensors.
        pages: that hold its K and V, in order.
        tokens: resident tokens.
        queries: of its newest tokens that are in the query ring, at most W + 1.
        used: slots of its working set in use in its last step.
        filled: slots in use once the answer to its last step is applied.
    """

    epoch: int
    slot: int
    pages: list[int] = dataclasses.field(default_factory=list)
    tokens: int = 0
    queries: int = 0
    used: int = 0
    filled: int = 0

    def advance(self, config: CacheRankConfig, position: int) -> None:
        """Account for the step at `position`."""
        self.tokens = position + 1
        self.queries = min(self.queries + 1, config.query_window + 1)
        self.used = self.filled
        self.filled = config.filled_after(position, self.filled)
