"""Segments of one sequence of `mosaickv`, and the tokens that still wait (MosaicKV section 5.4).

    tokens 0 .. 255         the opening: held as it came until complete, then compressed at once
    segment 1, 2, ...       compressed a buffer at a time by the newest strategy that there is,
                            and once more, by its own, after it is finished

A segment is finished at its largest length, or where the losses of compressing its tokens sum to
more than the threshold. Losses are looked at every eighth of that length; not before a quarter, so
that strategies take little memory beside tokens. Its own strategy is found on another thread from a
full-precision copy. It takes effect when the sequence has an eighth of the largest length more
tokens, no sooner and no later: what a sequence holds is a function of its tokens, and not of how
long the thread took. Until then the previous strategy serves the tokens that follow, too.

The paper cuts input tokens by length alone, which it can since a prompt is there as a whole. Here
prompts come in chunks, and what is loaded may be output of a request that was served densely or is
computed again: the rule of output tokens holds for all.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.copies import Readback, upload
from cache_rank.kernels.mosaickv import compress_buffers
from cache_rank.residency.mosaickv.memory import PackedMemory
from cache_rank.residency.mosaickv.strategy import BUFFER_TOKENS, Strategies, find_strategies

OPENING_TOKENS = 256
"""The first segment, which has no previous strategy, has so many tokens."""

_LARGEST_NORM = torch.finfo(torch.float32).max / 2
"""No vector may be longer: its rotated elements must be float32, whatever is rounded."""


class _Finished(NamedTuple):
    """A segment, tokens [first, last), whose own strategy serves from token `due` on."""

    first: int
    last: int
    due: int
    result: Future[Strategies]


class Segments:
    """One sequence: which strategy each of its tokens has.

    Attributes:
        strategies: rows of the strategy tables, one for each finished segment whose own serves.
    """

    def __init__(self, memory: PackedMemory, slot: int) -> None:
        self.strategies: list[int] = []
        self._memory, self._store, self._slot = memory, memory.store, slot
        self._compression, self._layers = memory.compression, range(memory.model.layers)
        self._first, self._complete = 0, 0  # where the segment begins, and complete buffers end
        self._finished: _Finished | None = None
        self._loss: Readback | None = None  # of all complete buffers, on its way to the host
        buffers = memory.compression.longest // BUFFER_TOKENS
        self._losses = torch.zeros(
            (buffers, memory.model.layers, 2, memory.model.kv_heads),
            dtype=torch.float64,
            device=memory.store.numbers.device,
        )
        memory.store.strategy_of[slot].fill_(-1)
        memory.store.rows[slot].fill_(-1)

    def at_once(self, stop: int) -> int:
        """How many tokens there may be after an `append`, of `stop` that there are."""
        if stop < self._complete + BUFFER_TOKENS:
            return stop
        self._end_if_lossy()
        last, step = OPENING_TOKENS, self._compression.step
        if self.strategies:  # losses are looked at here
            length = (self._complete - self._first) // step * step + step
            last = self._first + max(length, self._compression.shortest)
        if self._finished is not None:
            last = min(last, self._finished.due)
        return min(last, stop) // BUFFER_TOKENS * BUFFER_TOKENS

    def append(self, pages: Tensor, layers: range, resident: int) -> None:
        """Account for the next tokens of some layers, which are in the ring.

        These layers have `resident` tokens then, which end with a buffer or before; those of all
        layers may end where `at_once` says. All layers, the last ones last, take one token over
        before any takes another.

        Raises:
            ValueError: a token of a complete buffer is not finite.
        """
        if resident % BUFFER_TOKENS:
            return
        first = min(self._complete, resident - BUFFER_TOKENS)
        self._require_finite(layers, first, resident)
        if self._complete < resident:  # the first layers that get here
            self._end_if_lossy()
            self._complete = resident
            if self.strategies:
                self._assign(first, resident, len(self.strategies) - 1)
        if self.strategies:
            row, losses = (
                self.strategies[-1],
                self._losses[(first - self._first) // BUFFER_TOKENS :],
            )
            compress_buffers(self._store, pages, self._slot, row, layers, first, resident, losses)
        if layers.stop == self._layers.stop:
            self._advance(pages, resident)

    def end(self) -> None:
        """Compute nothing more for the sequence, and hold nothing of it."""
        if self._finished is not None:
            self._finished.result.cancel()
        self._memory.free_rows += self.strategies

    def _require_finite(self, layers: range, first: int, last: int) -> None:
        """Check that tokens are finite: otherwise they cannot be rotated.

        Raises:
            ValueError: some are not; on a GPU `not_finite` says so.
        """
        tokens = self._store.newest(self._slot, slice(layers.start, layers.stop), first, last)
        norms = torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float64)
        refused = (~(norms <= _LARGEST_NORM)).any(dim=-1)
        self._memory.not_finite.note(self._slot, layers, refused)
        if not tokens.is_cuda:
            self._memory.not_finite.check()

    def _assign(self, first: int, last: int, index: int) -> None:
        """Note that tokens [first, last) are compressed by the sequence's strategy `index`."""
        buffers = slice(first // BUFFER_TOKENS, last // BUFFER_TOKENS)
        self._store.strategy_of[self._slot, buffers].fill_(index)

    def _advance(self, pages: Tensor, resident: int) -> None:
        """End what ends now that all layers have so many tokens, in complete buffers."""
        length, compression = resident - self._first, self._compression
        if not self.strategies and length == OPENING_TOKENS:  # waits for no other sequence's
            self._memory.not_finite.check(wait=True)
            found = find_strategies(self._tokens(0, resident), self._layers, self._compression)
            self._switch(pages, 0, resident, found)
            self._first = resident
        elif self.strategies and length == compression.longest:
            self._finish()
        elif self.strategies and length >= compression.shortest and length % compression.step == 0:
            self._loss = Readback()
            self._loss.start(self._losses.sum())
        if self._finished is not None and self._finished.due == resident:
            first, last, _, result = self._finished
            self._switch(pages, first, last, result.result())
            self._finished = None

    def _end_if_lossy(self) -> None:
        """Finish the segment if its complete buffers have lost enough.

        On a GPU the loss is known later, but before anything depends on it: when the next buffer is
        complete.
        """
        if self._loss is None:
            return
        loss = self._loss.wait()
        self._loss = None
        vectors = 2 * self._memory.model.kv_heads * self._memory.model.layers
        if loss is not None and float(loss) / vectors > self._compression.threshold:
            self._finish()

    def _finish(self) -> None:
        """End the segment with the complete buffers, and begin to find its own strategy."""
        first, last = self._first, self._complete
        arguments = (self._tokens(first, last), self._layers, self._compression)
        result = self._memory.submit(find_strategies, *arguments)
        self._finished = _Finished(first, last, last + self._compression.step, result)
        self._first = last
        self._losses.zero_()

    def _tokens(self, first: int, last: int) -> Callable[[int], Tensor]:
        """Tokens [first, last) of a layer, as they came."""
        return partial(self._store.newest, self._slot, first=first, last=last)

    def _switch(self, pages: Tensor, first: int, last: int, found: Strategies) -> None:
        """Let the own strategy of tokens [first, last) serve them, and those that follow."""
        row, store = self._memory.free_rows.pop(), self._store
        (numbers,) = upload((found.numbers,), store.numbers.device)
        store.numbers[row].copy_(numbers)
        store.rotations[row].copy_(found.rotations)
        if found.rotations.is_cuda:
            found.rotations.record_stream(torch.cuda.current_stream())
        store.rows[self._slot, len(self.strategies)].fill_(row)
        self._assign(first, last, len(self.strategies))
        compress_buffers(store, pages, self._slot, row, self._layers, first, last)
        self.strategies.append(row)
