"""Segments of one sequence of `mosaickv`, and the tokens that still wait (MosaicKV section 5.4).

    tokens 0 .. 255         the opening: held as it came until complete, then compressed at once
    segment 1, 2, ...       compressed a buffer at a time by the newest strategy that there is,
                            and once more, by its own, after it is finished

A segment is finished where the losses of compressing its tokens sum to more than the threshold, or
at its largest length; not before a quarter of that, so that strategies take little memory beside
tokens. Its own strategy, and its tokens compressed by it, are computed on another thread from a
full-precision copy. They take effect when the sequence has an eighth of the largest length more
tokens, no sooner and no later: what a sequence holds is a function of its tokens, and not of how
long the thread took. Until then the previous strategy serves the tokens that follow, too.

The paper cuts input tokens by length alone, which it can since a prompt is there as a whole. Here
prompts come in chunks, and what is loaded may be output of a request that was served densely or is
computed again: the rule of output tokens holds for all.

Buffers of a shipment are compressed several at once, where nothing is decided between them: the
losses of a segment are known to stay below the threshold, since no token loses more than itself.

A sequence that is truncated forgets tokens of two buffers at most. What followed from the newest
complete one is undone by going back to the state before it, which is kept until the next.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch
from cache_rank_kernels.mosaickv.store import newest_tokens
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.copies import Readback
from cache_rank.pages import ROLLBACK_TOKENS
from cache_rank.residency.mosaickv.memory import BUFFER_TOKENS, PackedMemory
from cache_rank.residency.mosaickv.strategy import Candidates, CompressedTokens, recompress

assert BUFFER_TOKENS >= ROLLBACK_TOKENS, "or truncation might undo two buffers"

OPENING_TOKENS = 256
"""Tokens of the first segment, which has no previous strategy."""

_MOST_BUFFERS = 8
"""That are compressed at once: more take more scratch, and not much less time each."""


class SegmentLengths(NamedTuple):
    """Where a segment is finished, and when its own strategy takes effect.

    Attributes:
        most: tokens of a segment, a multiple of 512.
        threshold: of the accumulated loss, in tokens that are lost altogether.
    """

    most: int
    threshold: float

    @property
    def least(self) -> int:
        """Tokens of a segment, but for the opening."""
        return self.most // 4

    @property
    def delay(self) -> int:
        """Tokens between the end of a segment and the step from which its own strategy serves."""
        return self.most // 8

    @property
    def originals(self) -> int:
        """Most tokens of a sequence that are held in full precision."""
        return self.most + self.delay + BUFFER_TOKENS


class _Recompression(NamedTuple):
    """A finished segment, on its way to its own strategy."""

    first: int
    last: int
    due: int
    result: Future[list[CompressedTokens]]


@dataclasses.dataclass
class _State:
    """What follows from a sequence's complete buffers.

    Attributes:
        tokens: in complete buffers, of the layers that have most.
        first: of the segment that is not finished yet.
        losses: (layers,) float64, accumulated in that segment.
        covariance: (layers, 2, Hkv, D, D) float64, of that segment's keys and values.
        strategies: of each finished segment whose own serve, their row in the tables.
        strategy_of: for each buffer in the pages, which of them.
        recompression: under way.
        loss, loss_at: mean of the losses on its way to the host, and the tokens it is of.
        lost: mean of the losses that the host knows.
        lost_at: tokens that it knows them of.
    """

    tokens: int
    first: int
    losses: Tensor
    covariance: Tensor
    strategies: list[int] = dataclasses.field(default_factory=list)
    strategy_of: list[int] = dataclasses.field(default_factory=list)
    recompression: _Recompression | None = None
    loss: Readback | None = None
    loss_at: int = 0
    lost: float = 0.0
    lost_at: int = 0

    def most_lost(self) -> float:
        """What the mean of the losses is at most."""
        return self.lost + (self.tokens - self.lost_at)

    def copied(self) -> _State:
        """Changes of either do not show in the other; the covariance is still to be computed."""
        return dataclasses.replace(
            self,
            losses=self.losses.clone(),
            covariance=torch.empty_like(self.covariance),
            strategies=list(self.strategies),
            strategy_of=list(self.strategy_of),
        )


class Segments:
    """One sequence: which strategy each of its tokens has.

    Attributes:
        resident: tokens of each layer, all of them in the ring of the slot when they come.
    """

    def __init__(
        self,
        model: ModelShape,
        candidates: Candidates,
        lengths: SegmentLengths,
        executor: Executor,
        memory: PackedMemory,
        slot: int,
    ) -> None:
        self.resident = [0] * model.layers
        self._model = model
        self._candidates = candidates
        self._lengths = lengths
        self._executor = executor
        self._memory = memory
        self._slot = slot
        self._state = _State(0, 0, self._no_losses(), self._no_covariance())
        self._before = self._state
        """Without the newest complete buffer."""
        memory.begin(slot)

    def _no_losses(self) -> Tensor:
        device = self._memory.store.rings[0].device
        return torch.zeros(self._model.layers, dtype=torch.float64, device=device)

    def _no_covariance(self) -> Tensor:
        model, device = self._model, self._memory.store.rings[0].device
        shape = (model.layers, 2, model.kv_heads, model.head_dim, model.head_dim)
        return torch.zeros(shape, dtype=torch.float64, device=device)

    def at_once(self, stop: int) -> int:
        """How many tokens all layers may have after an `append`, of `stop` that there are."""
        self._end_if_lossy(wait=True)
        state, lengths = self._state, self._lengths
        if stop < state.tokens + BUFFER_TOKENS:
            return stop
        last = state.first + (lengths.most if state.strategies else OPENING_TOKENS)
        if state.recompression is not None:
            last = min(last, state.recompression.due)
        if state.strategies:  # with more tokens than these, losses may end the segment
            spared = int(max(0.0, lengths.threshold - state.lost))
            undecided = max(state.first + lengths.least - BUFFER_TOKENS, state.lost_at + spared)
            last = min(last, max(undecided, state.tokens) + BUFFER_TOKENS)
        last = min(last, stop, state.tokens + _MOST_BUFFERS * BUFFER_TOKENS)
        return last // BUFFER_TOKENS * BUFFER_TOKENS

    def append(self, pages: Tensor, layers: range, resident: int) -> None:
        """The next tokens of some layers are in the ring.

        Args:
            pages: (pages,) int32 of the sequence.
            layers: whose. All layers take one token over before any takes another buffer.
            resident: tokens of these layers. They end with a buffer or before; those of all layers
                may end where `at_once` says.

        Raises:
            ValueError: a token of a complete buffer is not finite.
        """
        self.resident[layers.start : layers.stop] = [resident] * len(layers)
        if resident % BUFFER_TOKENS:
            return
        taken, first = self._state.tokens, resident - BUFFER_TOKENS
        self._memory.require_finite(self._slot, layers, min(taken, first), resident)
        if taken < resident:  # the first layers that get here
            self._end_if_lossy(wait=True)
            if taken < first:
                self._take(pages, layers, taken, first, self._state.covariance)
                self._state.tokens = first
            self._before, self._state = self._state, self._state.copied()
            self._state.tokens = resident
        self._take(pages, layers, first, resident, self._before.covariance)
        if min(self.resident) == resident:
            self._advance(pages, resident)

    def _take(self, pages: Tensor, layers: range, first: int, last: int, before: Tensor) -> None:
        """Account for complete buffers, and compress them by the newest strategy."""
        state, memory = self._state, self._memory
        memory.add_covariance(self._slot, layers, first, last, before, state.covariance)
        if not state.strategies:
            return
        index = len(state.strategies) - 1
        if len(state.strategy_of) == first // BUFFER_TOKENS:  # the first layers that get here
            state.strategy_of += [index] * ((last - first) // BUFFER_TOKENS)
            memory.assign(self._slot, first, last, index)
        row = state.strategies[index]
        memory.compress(pages, self._slot, row, layers, first, last, state.losses)

    def truncate(self, pages: Tensor, tokens: int) -> None:
        """Forget all but the first tokens, at most ROLLBACK_TOKENS fewer than there ever were."""
        self.resident = [tokens] * self._model.layers
        if tokens >= self._state.tokens:
            return
        undone, self._state = self._state, self._before
        state = self._state
        if undone.recompression is not state.recompression:
            _cancel(undone.recompression)
        if len(undone.strategies) > len(state.strategies):
            self._memory.release(undone.strategies[len(state.strategies) :])
            if state.strategies:
                self._compress_as_before(pages)
        self._memory.restore(self._slot, state.strategy_of, len(state.strategies))

    def _compress_as_before(self, pages: Tensor) -> None:
        """Compress a finished segment as it was before its own strategy served."""
        state = self._state
        assert state.recompression is not None
        every_layer, losses = range(self._model.layers), self._no_losses()
        for first in range(state.recompression.first, state.recompression.last, BUFFER_TOKENS):
            row = state.strategies[state.strategy_of[first // BUFFER_TOKENS]]
            last = first + BUFFER_TOKENS
            self._memory.compress(pages, self._slot, row, every_layer, first, last, losses)

    def end(self) -> None:
        """Compute nothing more for the sequence, and hold nothing of it."""
        _cancel(self._state.recompression)
        self._memory.release(self._state.strategies)

    def _advance(self, pages: Tensor, resident: int) -> None:
        """All layers have so many tokens, in complete buffers."""
        state, length = self._state, resident - self._state.first
        if length == (self._lengths.most if state.strategies else OPENING_TOKENS):
            self._finish(resident)
        elif state.strategies and length >= self._lengths.least:
            state.loss, state.loss_at = Readback(), resident
            state.loss.start(state.losses.mean())
            self._end_if_lossy(wait=False)
        if state.recompression is not None and state.recompression.due == resident:
            self._switch(pages, state.recompression)

    def _end_if_lossy(self, wait: bool) -> None:
        """Finish the segment with the newest complete buffer, if it has lost enough.

        On a GPU the loss is known later, but before anything depends on it: when the next buffer is
        complete. Nothing does where it cannot be enough.
        """
        state = self._state
        if state.loss is None:
            return
        must_know = wait and state.most_lost() > self._lengths.threshold
        loss = state.loss.wait() if must_know else state.loss.value()
        if loss is not None:
            state.loss, state.lost, state.lost_at = None, float(loss), state.loss_at
            if state.lost > self._lengths.threshold:
                self._finish(state.tokens)

    def _finish(self, last: int) -> None:
        state, first = self._state, self._state.first

        def tokens_of(layer: int) -> Tensor:
            return newest_tokens(self._memory.store, self._slot, layer, first, last)

        result: Future[list[CompressedTokens]]
        if state.strategies:
            due = last + self._lengths.delay
            result = self._executor.submit(
                self._memory.beside(recompress), tokens_of, state.covariance, self._candidates
            )
        else:  # the opening, which waits for no other sequence's
            self._memory.check(wait=True)
            due, result = last, Future()
            result.set_result(recompress(tokens_of, state.covariance, self._candidates))
        state.recompression = _Recompression(first, last, due, result)
        state.first, state.losses, state.covariance = last, self._no_losses(), self._no_covariance()
        state.loss, state.lost, state.lost_at = None, 0.0, last

    def _switch(self, pages: Tensor, finished: _Recompression) -> None:
        """Let the finished segment's own strategy serve."""
        state, layers = self._state, self._memory.adopt(finished.result.result())
        index = len(state.strategies)
        state.strategies.append(self._memory.add(self._slot, index, layers))
        first, last = finished.first // BUFFER_TOKENS, finished.last // BUFFER_TOKENS
        state.strategy_of[first:last] = [index] * (last - first)
        self._memory.assign(self._slot, finished.first, finished.last, index)
        for layer, tokens in enumerate(layers):
            self._memory.write(pages, layer, finished.first, tokens)
        state.recompression = None


def _cancel(recompression: _Recompression | None) -> None:
    if recompression is not None:
        recompression.result.cancel()
