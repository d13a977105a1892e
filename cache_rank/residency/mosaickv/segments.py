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
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.copies import Readback
from cache_rank.kernels.mosaickv import add_covariance, compress_buffers
from cache_rank.kernels.mosaickv.store import Strategy, newest_tokens
from cache_rank.kernels.mosaickv.vectors import PackedVectors
from cache_rank.residency.mosaickv.memory import PackedMemory
from cache_rank.residency.mosaickv.strategy import BUFFER_TOKENS, recompress

OPENING_TOKENS = 256
"""The first segment, which has no previous strategy, has so many tokens."""

MOST_BUFFERS = 8
"""So many buffers are compressed at once: more take more scratch, and not much less time each."""


class _Recompression(NamedTuple):
    """A finished segment from token `first` on, whose own strategy serves from token `due` on."""

    first: int
    due: int
    result: Future[list[tuple[Strategy, PackedVectors]]]


class Segments:
    """One sequence: which strategy each of its tokens has.

    Attributes:
        resident: how many tokens each layer has, all of them in the ring of the slot when they
            come.
        strategies: rows of the strategy tables, one for each finished segment whose own serves.
    """

    def __init__(self, memory: PackedMemory, executor: Executor, slot: int) -> None:
        self.resident = [0] * memory.model.layers
        self.strategies: list[int] = []
        self._compression = memory.compression
        self._executor = executor
        self._memory = memory
        self._slot = slot
        self._complete = 0  # tokens in complete buffers, of the layers that have most
        self._recompression: _Recompression | None = None
        self._loss: Readback | None = None  # mean of the losses, on its way to the host
        self._loss_at = 0  # the tokens that it is of
        self._begin_segment(0)
        memory.begin(slot)

    def _begin_segment(self, first: int) -> None:
        """Begin to account for the segment whose first token is at `first`."""
        model, device = self._memory.model, self._memory.store.rings[0].device
        shape = (model.layers, 2, model.kv_heads, model.head_dim, model.head_dim)
        self._first = first
        self._losses = torch.zeros(model.layers, dtype=torch.float64, device=device)
        self._covariance = torch.zeros(shape, dtype=torch.float64, device=device)
        self._loss = None
        # The host knows the mean of the losses of the tokens before `_lost_at`.
        self._lost, self._lost_at = 0.0, first

    def at_once(self, stop: int) -> int:
        """How many tokens all layers may have after an `append`, of `stop` that there are."""
        self._end_if_lossy(wait=True)
        compression = self._compression
        if stop < self._complete + BUFFER_TOKENS:
            return stop
        last = self._first + (compression.longest if self.strategies else OPENING_TOKENS)
        if self._recompression is not None:
            last = min(last, self._recompression.due)
        if self.strategies:  # with more tokens than these, losses may end the segment
            spared = int(max(0.0, compression.threshold - self._lost))
            sure = self._first + compression.shortest - BUFFER_TOKENS
            undecided = max(sure, self._lost_at + spared)
            last = min(last, max(undecided, self._complete) + BUFFER_TOKENS)
        last = min(last, stop, self._complete + MOST_BUFFERS * BUFFER_TOKENS)
        return last // BUFFER_TOKENS * BUFFER_TOKENS

    def append(self, pages: Tensor, layers: range, resident: int) -> None:
        """Account for the next tokens of some layers, which are in the ring.

        These layers have `resident` tokens then, which end with a buffer or before; those of all
        layers may end where `at_once` says. All layers take one token over before any takes another
        buffer.

        Raises:
            ValueError: a token of a complete buffer is not finite.
        """
        self.resident[layers.start : layers.stop] = [resident] * len(layers)
        if resident % BUFFER_TOKENS:
            return
        first = min(self._complete, resident - BUFFER_TOKENS)
        self._memory.require_finite(self._slot, layers, first, resident)
        if self._complete < resident:  # the first layers that get here
            self._end_if_lossy(wait=True)
            self._complete = resident
            if self.strategies:
                self._memory.assign(self._slot, first, resident, len(self.strategies) - 1)
        store = self._memory.store
        add_covariance(store, self._slot, layers, first, resident, self._covariance)
        if self.strategies:
            row = self.strategies[-1]
            compress_buffers(store, pages, self._slot, row, layers, first, resident, self._losses)
        if min(self.resident) == resident:
            self._advance(pages, resident)

    def end(self) -> None:
        """Compute nothing more for the sequence, and hold nothing of it."""
        if self._recompression is not None:
            self._recompression.result.cancel()
        self._memory.free_rows += self.strategies

    def _advance(self, pages: Tensor, resident: int) -> None:
        """End what ends now that all layers have so many tokens, in complete buffers."""
        length = resident - self._first
        if length == (self._compression.longest if self.strategies else OPENING_TOKENS):
            self._finish(resident)
        elif self.strategies and length >= self._compression.shortest:
            self._loss, self._loss_at = Readback(), resident
            self._loss.start(self._losses.mean())
            self._end_if_lossy(wait=False)
        if self._recompression is not None and self._recompression.due == resident:
            self._switch(pages, self._recompression)

    def _end_if_lossy(self, wait: bool) -> None:
        """Finish the segment with the newest complete buffer, if it has lost enough.

        On a GPU the loss is known later, but before anything depends on it: when the next buffer is
        complete. Nothing does where it cannot be enough: no token loses more than itself.
        """
        if self._loss is None:
            return
        most_lost = self._lost + (self._complete - self._lost_at)
        must_know = wait and most_lost > self._compression.threshold
        loss = self._loss.wait() if must_know else self._loss.value()
        if loss is not None:
            self._loss, self._lost, self._lost_at = None, float(loss), self._loss_at
            if self._lost > self._compression.threshold:
                self._finish(self._complete)

    def _finish(self, last: int) -> None:
        """End the segment before token `last`, and begin to compute its own strategy."""
        first = self._first

        def tokens_of(layer: int) -> Tensor:
            return newest_tokens(self._memory.store, self._slot, layer, first, last)

        arguments = (tokens_of, self._covariance, self._compression)
        result: Future[list[tuple[Strategy, PackedVectors]]]
        if self.strategies:
            due = last + self._compression.delay
            result = self._executor.submit(self._memory.beside(recompress), *arguments)
        else:  # the opening, which waits for no other sequence's
            self._memory.not_finite.check(wait=True)
            due, result = last, Future()
            result.set_result(recompress(*arguments))
        self._recompression = _Recompression(first, due, result)
        self._begin_segment(last)

    def _switch(self, pages: Tensor, finished: _Recompression) -> None:
        """Let the finished segment's own strategy serve."""
        index, found = len(self.strategies), finished.result.result()
        row = self._memory.adopt(pages, self._slot, index, finished.first, found)
        self.strategies.append(row)
        self._recompression = None
