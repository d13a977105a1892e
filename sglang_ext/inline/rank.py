"""Which requests of a scheduler process are sparse, and what users see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from sglang_ext import compat, reuse
from sglang_ext.drafts.number import DraftNumber
from sglang_ext.inline.attention import InlineAttnBackend
from sglang_ext.inline.metrics import InlineMetrics
from sglang_ext.inline.selection import NEVER, Selection
from sglang_ext.payoff import Payoff
from sglang_ext.request_state import DenseReason, asks_to_stay_dense, prepare_requests
from sglang_ext.server_args import CacheRankServerArgs

if TYPE_CHECKING:
    from sglang_ext.inline.draft_weights import DraftWeights

Result = TypeVar("Result")


class InlineRank:
    """Tells the selection which request has which slot, and counts.

    Attributes:
        payoff: tells which steps selection makes shorter; None where it does not matter.
        drafts: tells how many drafts a round has; None without drafts.
        draft_weights: of 4 bits; None where drafts run with the model's.
        round: nothing is verified elsewhere.
        fit_again: fits the sketches to weights that will be loaded, and says whether it could; None
            where they are fitted to those of today.
    """

    round: ClassVar[None] = None

    def __init__(self, args: CacheRankServerArgs, selection: Selection, tp_rank: int) -> None:
        self.selection = selection
        self.payoff: Payoff | None = None
        self.drafts: DraftNumber | None = None
        self.draft_weights: DraftWeights | None = None
        self.fit_again: Callable[[], bool] | None = None
        self._args = args
        self._weight_updates = 0
        self._steps = 0
        self._sparse_slots: set[int] = set()
        self._is_deterministic = args.enable_deterministic_inference
        self._metrics = InlineMetrics(args, tp_rank)

    # Events of SGLang, in the order of a request's life.

    def before_match(self, request: Any) -> None:
        """Let a request find what the weights of today have computed, if it has nothing yet."""
        sparse_tokens = self._args.reuse_sparse_tokens == "on"
        reuse.set_namespace(request, sparse_tokens, self._weight_updates)

    def run_other(self, requests: list[Any], forward: Callable[[], Result]) -> Result:
        """Run a step that is no decode step, a prefill say."""
        self._enter(requests)
        # Weights come in parts. The first prefill says that they are all there.
        if self._weight_updates and self.fit_again is not None and self.fit_again():
            self.fit_again = None
        return forward()

    def run_decode(
        self, requests: list[Any], lengths: list[int], forward: Callable[[], Result]
    ) -> Result:
        """Run a decode step of requests of such lengths, current tokens included."""
        self._enter(requests)
        sparse = self._where_shorter(self._long_ones(requests, lengths), lengths)
        self._count(requests, sparse, steps=1)
        for request, length in sparse:
            reuse.note_sparse(request, length - 1)
        # SGLang's kernels and ours round differently. Where tokens must not depend on the batch,
        # all steps take ours.
        self.selection.step_is_sparse = bool(sparse) or self._is_deterministic
        return forward()

    def plan_drafts(self, requests: list[Any], lengths: list[int]) -> int:
        """Decide how many drafts a round has of requests of such lengths; 0 is a dense step."""
        assert self.drafts is not None
        self._enter(requests)
        long_ones = self._long_ones(requests, lengths)
        drafts = 0
        if long_ones:
            drafts = self.drafts.choose(len(requests), *self._load(long_ones, lengths))
        if drafts == 0:
            _give_reason(long_ones, "not_shorter")
        elif self.draft_weights is not None:
            self.draft_weights.before_drafts()
        self._count(requests, long_ones if drafts else [], drafts or 1)
        return drafts

    def _long_ones(self, requests: list[Any], lengths: list[int]) -> list[tuple[Any, int]]:
        """The requests that may be sparse, and their lengths; others get a reason."""
        found = []
        for request, length in zip(requests, lengths, strict=True):
            if length < self._args.sparse_from:
                request.cache_rank_statistics.dense_reason = "below_threshold"
            elif request.cache_rank_sparse_from == NEVER:
                request.cache_rank_statistics.dense_reason = "asked"
                self._metrics.series.count_dense(request, "asked")
            else:
                found.append((request, length))
        return found

    def _where_shorter(
        self, long_ones: list[tuple[Any, int]], lengths: list[int]
    ) -> list[tuple[Any, int]]:
        """Those that a step selects for: all, or none if this would make the step longer."""
        if self.drafts is not None:
            return []  # dense, as all that is no draft; the round has given the reason
        if self.payoff is None or not long_ones:
            return long_ones
        if self.payoff.is_shorter(*self._load(long_ones, lengths)):
            return long_ones
        _give_reason(long_ones, "not_shorter")
        return []

    def _load(self, long_ones: list[tuple[Any, int]], lengths: list[int]) -> tuple[int, int, int]:
        """The tokens of a step: all, those scored if it selects, and those then attended to."""
        tokens, scored = sum(lengths), sum(length for _, length in long_ones)
        selected = sum(self.selection.attended(length) for _, length in long_ones)
        return tokens, scored, tokens - scored + selected

    def _count(self, requests: list[Any], sparse: list[tuple[Any, int]], steps: int) -> None:
        """Account for steps that select for some requests."""
        attended = 0
        for request, length in sparse:
            statistics = request.cache_rank_statistics
            statistics.dense_reason = None
            statistics.sparse_steps += steps
            statistics.attended_tokens = self.selection.attended(length)
            attended += statistics.attended_tokens
        self._sparse_slots = {compat.pool_state(request).req_pool_idx for request, _ in sparse}
        self._steps += steps if sparse else 0
        for _ in range(steps):
            self._metrics.on_decode(len(requests), len(sparse), attended)

    def _enter(self, requests: list[Any]) -> None:
        """Write what is known of requests that have come to a slot."""
        prepare_requests(requests)
        new = [request for request in requests if request.cache_rank_sparse_from is None]
        if not new:
            return
        for request in new:
            stays_dense = asks_to_stay_dense(request)
            request.cache_rank_sparse_from = NEVER if stays_dense else self._args.sparse_from
        slots = [compat.pool_state(request).req_pool_idx for request in new]
        values = [request.cache_rank_sparse_from for request in new]
        told = torch.tensor([slots, values], dtype=torch.int64)
        of_device = self.selection.sparse_from
        if of_device.is_cuda:
            told = told.pin_memory().to(of_device.device, non_blocking=True)
        of_device[told[0]] = told[1].to(torch.int32)

    def on_request_freed(self, request: Any) -> None:
        """Forget the slot of a request that SGLang takes back."""
        reuse.forget(request)
        request.cache_rank_sparse_from = None
        slot = compat.pool_state(request).req_pool_idx
        if slot in self._sparse_slots:
            self._sparse_slots.remove(slot)
            if not self._sparse_slots:
                self._metrics.series.set("sparse_requests", 0)

    def on_weights_updated(self) -> None:
        """Keep what other weights have computed apart."""
        self._weight_updates += 1
        if self.draft_weights is not None:
            self.draft_weights.on_weights_updated()

    def draft_backend(self, runner: Any) -> Any:
        """Make the attention backend of decode steps, for whose graphs it may be captured."""
        return InlineAttnBackend(runner, self._args, self.selection)

    def run_draft(
        self, requests: list[Any], lengths: list[int], forward: Callable[[], Result]
    ) -> Result:
        """Run a decode step that drafts, for which requests have been planned."""
        self.selection.step_is_sparse = True
        try:
            return forward()
        finally:
            self.selection.step_is_sparse = False

    def run_dense(
        self, requests: list[Any], lengths: list[int], forward: Callable[[], Result]
    ) -> Result:
        return forward()

    def run_verification(self, forward: Callable[..., Result]) -> Result:
        return forward()

    def capture_both_kinds(self, capture: Callable[[], None]) -> None:
        """Capture the graphs of steps without sparse requests, then those of steps with some."""
        before = self.selection.step_is_sparse
        for step_is_sparse in (False, True):
            self.selection.step_is_sparse = step_is_sparse
            capture()
        self.selection.step_is_sparse = before

    # What users see.

    def state(self, tree_cache: Any) -> dict[str, Any]:
        """Return what `/server_info` shows; what SGLang's tree can give up counts as free."""
        free = tree_cache.token_to_kv_pool_allocator.available_size()
        return {
            "placement": "inline",
            "steps": self._steps,
            "sparse_requests": len(self._sparse_slots),
            "pool_free_tokens": free + tree_cache.evictable_size(),
            "sparse_budget": str(self.selection.curve),
            "sketch_bytes": self.selection.sketch_bytes,
            "seconds_of_steps": self.payoff and self.payoff._asdict(),
            "drafts": self.drafts and self.drafts.state(),
            "draft_weight_bytes": self.draft_weights and self.draft_weights.bytes,
        }


def _give_reason(requests: list[tuple[Any, int]], why: DenseReason) -> None:
    for request, _ in requests:
        request.cache_rank_statistics.dense_reason = why
