"""What the cache rank's host knows of one sequence; its tensors are in the selector's state."""

from __future__ import annotations

import dataclasses

from cache_rank.config import CacheRankConfig


@dataclasses.dataclass(slots=True)
class ResidentSequence:
    """One incarnation of a request on the inference rank, whose K and V the cache rank holds.

    Attributes:
        sequence_id: its number.
        slot: its row in the selector's state tensors.
        pages: the pages that hold its K and V, in order.
        tokens: how many of its tokens are resident.
        stepped: where its last step ended: the position behind it.
        shared: how many of its pages have a name, by which other sequences may hold them, too.
        copied: whether the page behind these, 1 or 0, is a copy of one that has a name.
        complete: how many of its first tokens came in complete pages, of others or as codes.
        queries: how many of the tokens before `stepped` have their query in the query ring, at most
            W + 1.
        filled: how many slots are in use once the answer to its last step is applied.
        fresh_filled: the same of groups that are answered for the step itself.
    """

    sequence_id: int
    slot: int
    pages: list[int] = dataclasses.field(default_factory=list)
    tokens: int = 0
    stepped: int = 0
    shared: int = 0
    copied: int = 0
    complete: int = 0
    queries: int = 0
    filled: int = 0
    fresh_filled: int = 0

    def advance(self, config: CacheRankConfig, position: int) -> None:
        newest, before = position, position - 1
        if config.draft_steps:
            newest = before = self.tokens - 1
        else:
            self.tokens = position + 1
        # Drafts may have been wrong, or there were steps of which this rank has no query.
        back = self.stepped - position
        self.queries = max(0, self.queries - back) if back >= 0 else 0
        self.queries = min(self.queries + 1, config.query_window + 1)
        self.stepped = position + 1
        self.filled = config.filled_after(newest, self.filled)
        self.fresh_filled = config.filled_after(before, self.fresh_filled)
