"""A request's life as the cache rank sees it: SGLang's events become sequences.

A sequence is one incarnation of a request on one request slot. It begins in the first decode step
in which nothing speaks against it, see `reason_to_stay_dense`: measured times, other requests of
the batch and room count. For a prompt that another server prefills it begins with the first page.
It goes through three phases:

    shipping   dense; the prompt's K and V go to the cache rank, one chunk a step, or as they come
    warming    dense; steps are exchanged, slots fill, the query window fills
    sparse     attends to the working set

From where its own chunks are shipped, each transition depends on its own positions alone, never on
timing or batch mates. Before, it may wait for a prompt that another request ships. With drafts, a
round that the cache rank cannot serve takes it back to shipping. Finish, abort, retraction and
preemption all end the sequence in one place.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from cache_rank.config import CacheRankConfig
from cache_rank.pages import PAGE_TOKENS
from sglang_ext import compat
from sglang_ext.request_state import DenseReason, RequestStatistics, asks_to_stay_dense
from sglang_ext.two_ranks.shared_prompts import SharedPrefix, SharedPrompts
from sglang_ext.two_ranks.working_set import Reserve

MOST_LOSSES = 2
"""A request stays dense that was in so many cache ranks when they were lost: it may be the cause.

One whose keys are not finite is, and would end every cache rank that it is shipped to."""


class Phase(enum.Enum):
    SHIPPING = enum.auto()
    WARMING = enum.auto()
    SPARSE = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class SparseSequence:
    """Everything the inference rank owns for one sequence.

    Attributes:
        sequence_id: its number; only grows.
        block: first pool row of its reserve block.
        reserved_tokens: cache-rank capacity set aside for what it holds alone.
        shipped: tokens sent in bulk so far; what is sent next as it is begins behind them.
        complete: those of complete pages that it has of others or were sent as codes.
        exchanged: steps exchanged so far.
        filled: slots in use in the step being computed.
        fresh_filled: slots that were in use in the last step, of groups that are answered for the
            step itself.
        ended: nothing may be written into its block any more.
        orphaned: the cache rank that held its K and V is gone, and SGLang must recompute it.
        prefix: the pages of its prompt that it has in common with others.
    """

    sequence_id: int
    request: Any
    row: int
    block: int
    reserved_tokens: int
    statistics: RequestStatistics
    phase: Phase = Phase.SHIPPING
    shipped: int = 0
    complete: int = 0
    exchanged: int = 0
    filled: int = 0
    fresh_filled: int = 0
    ended: bool = False
    orphaned: bool = False
    prefix: SharedPrefix = dataclasses.field(default_factory=SharedPrefix)


class Lifecycle:
    """All live sequences of one inference rank.

    Attributes:
        live: the sequences by request slot.
        prompts: what prompts have in common; None where nothing is shared.
        capacity_tokens, host_tokens: how many tokens fit on the cache rank, and how many more that
            no sequence has.
        weight_updates: how often SGLang has loaded other weights.
    """

    def __init__(
        self,
        config: CacheRankConfig,
        reserve: Reserve,
        threshold: int,
        context_length: int,
        prompts: SharedPrompts | None = None,
    ) -> None:
        self.capacity_tokens = self.host_tokens = 0
        self.weight_updates = 0
        self.prompts = prompts
        self.live: dict[int, SparseSequence] = {}
        self._config = config
        self._reserve = reserve
        self._threshold = threshold
        self._context_length = context_length
        self._reserved_tokens = 0
        self._last_sequence_id = 0

    def reason_to_stay_dense(
        self, request: Any, length: int, is_up: bool, pays_from: int = 0
    ) -> DenseReason | None:
        """Say why a request may not begin a sequence: what is its own first, then what may pass.

        Args:
            pays_from: the length from which a sparse request makes its steps shorter.
        """
        if length < self._threshold:
            return "below_threshold"
        if asks_to_stay_dense(request):
            return "asked"
        if request.cache_rank_losses >= MOST_LOSSES:
            return "cache_rank_losses"
        if length < pays_from:
            return "not_shorter"
        if not is_up:
            return "down"
        if self._reserve.free_blocks == 0:
            return "max_sparse_requests"
        prefix = self._prefix(request, length)
        if not self._fits(self._alone(request, prefix.expected), prefix):
            return "cache_rank_memory"
        return None

    def may_be_short_of_room(self, running: Sequence[Any]) -> bool:
        """Whether a sequence more could leave a running request without room for its own."""
        dense = [each for each in running if compat.pool_state(each).req_pool_idx not in self.live]
        if self._reserve.free_blocks <= len(dense):
            return True
        reasons = (each.cache_rank_statistics.dense_reason for each in dense)
        return "cache_rank_memory" in reasons

    @property
    def some_are_sparse(self) -> bool:
        return any(sequence.phase is Phase.SPARSE for sequence in self.live.values())

    def begin(self, request: Any, length: int = 0) -> SparseSequence:
        """Begin a sequence for a request of so many tokens that has no reason to stay dense."""
        self._last_sequence_id += 1
        block = self._reserve.take()
        request.cache_rank_statistics.dense_reason = "shipping"
        prefix = self._prefix(request, length)
        sequence = SparseSequence(
            sequence_id=self._last_sequence_id,
            request=request,
            row=compat.pool_state(request).req_pool_idx,
            block=block,
            reserved_tokens=0,
            statistics=request.cache_rank_statistics,
            prefix=prefix,
        )
        self._reserve_tokens(sequence, self._alone(request, prefix.expected))
        self.live[sequence.row] = sequence
        return sequence

    def end(self, row: int) -> SparseSequence | None:
        sequence = self.live.pop(row, None)
        if sequence is not None:
            sequence.ended = True
            self._reserved_tokens -= sequence.reserved_tokens
            self._reserve.give_back(sequence.block)
            if self.prompts is not None:
                self.prompts.end(sequence.prefix)
        return sequence

    def take_shared(self, sequence: SparseSequence) -> list[int] | None:
        """Let a sequence have the pages of its prompt that there are.

        Returns:
            Their names; None if there is no room for the others, which there was when it began.
        """
        assert self.prompts is not None
        prefix = sequence.prefix
        wanted = self._alone(sequence.request, self.prompts.found(prefix))
        if not self._fits(wanted - sequence.reserved_tokens, prefix):
            return None
        self._reserve_tokens(sequence, wanted)
        return self.prompts.take(prefix)

    def name_shipped(self, sequence: SparseSequence) -> list[int]:
        """Name the pages of a sequence that are complete, for others to have; return the names."""
        assert self.prompts is not None
        names = self.prompts.name_shipped(sequence.prefix, sequence.shipped)
        sequence.reserved_tokens -= PAGE_TOKENS * len(names)
        self._reserved_tokens -= PAGE_TOKENS * len(names)
        return names

    def forget_shared(self) -> None:
        """Forget what prompts have in common, because the cache rank does."""
        if self.prompts is not None:
            self.prompts.clear()

    def move_on(self, sequence: SparseSequence, position: int) -> bool:
        """Move a sequence on to the step at `position`, and say whether it turns sparse there."""
        if sequence.phase is Phase.SHIPPING and sequence.shipped == position:
            sequence.phase = Phase.WARMING
            sequence.statistics.dense_reason = "warming"
        if sequence.phase is not Phase.WARMING:
            return False
        config = self._config
        warm = sequence.exchanged > config.query_window
        # Drafts follow the slots in their rows, so that all of these must be in use.
        wanted = config.slots_wanted_after(position - 1)
        if warm and sequence.filled == (config.sparse_budget if config.draft_steps else wanted):
            sequence.phase = Phase.SPARSE
            sequence.statistics.dense_reason = None
            return True
        return False

    def _prefix(self, request: Any, length: int) -> SharedPrefix:
        """What a request may share: tokens that were computed densely, and by the same weights."""
        if self.prompts is None or request.cache_rank_weights != self.weight_updates:
            return SharedPrefix()
        dense = request.cache_rank_dense_tokens
        return self.prompts.prefix_of(request, length if dense is None else min(dense, length))

    def _alone(self, request: Any, pages: int) -> int:
        """How many tokens a request holds alone, if it has so many pages of others."""
        spared = 0 if self.prompts is None else self.prompts.tokens_spared(pages)
        return self._final_length(request) - spared

    def _fits(self, tokens: int, prefix: SharedPrefix) -> bool:
        """Whether there is room, if need be in place of pages that nobody has."""
        held = self._reserved_tokens
        if self.prompts is not None:
            held += self.prompts.tokens - self.prompts.droppable(prefix.keys)
        return held + tokens <= self.capacity_tokens

    def _reserve_tokens(self, sequence: SparseSequence, tokens: int) -> None:
        """Set room aside, which there is."""
        self._reserved_tokens += tokens - sequence.reserved_tokens
        sequence.reserved_tokens = tokens
        if self.prompts is not None:
            held = self._reserved_tokens + self.prompts.tokens
            room = self.capacity_tokens + self.host_tokens
            self.prompts.drop(held - room, sequence.prefix.keys)

    def _final_length(self, request: Any) -> int:
        wanted = len(request.origin_input_ids) + (request.sampling_params.max_new_tokens or 0)
        # The overlap schedule runs one step beyond the end, or behind a round of drafts one more.
        return min(wanted, self._context_length) + 1 + self._config.draft_steps
