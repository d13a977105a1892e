"""Segments of one sequence of `mosaickv`, and the tokens that still wait (MosaicKV section 5.4).

    tokens 0 .. 255         the opening: held as it came until complete, then compressed at once
    segment 1, 2, ...       compressed a buffer at a time by the newest strategy that there is,
                            and once more, by its own, after it is finished

A segment is finished at its largest length, or where the losses of compressing its tokens sum to
more than the threshold. That is looked at every eighth of the largest length; not before a quarter,
so that strategies take little memory beside tokens, and without the newest eighth, whose losses a
GPU may not have told yet. Its own strategy is found on another thread from a full-precision copy.
It takes effect an eighth later, no sooner and no later: what a sequence holds is a function of its
tokens, and not of how long the thread took. Until then the previous strategy serves the tokens that
follow, too.

The paper cuts input tokens by length alone, which it can since a prompt is there as a whole. Here
prompts come in chunks, and what is loaded may be output of a request that was served densely or is
computed again: the rule of output tokens holds for all.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from cache_rank.copies import Readback, upload
from cache_rank.kernels.mosaickv import compress_buffers
from cache_rank.residency.mosaickv.memory import PackedMemory
from cache_rank.residency.mosaickv.strategy import BUFFER_TOKENS, find_strategies

OPENING_TOKENS = 256
"""The first segment, which has no previous strategy, has so many tokens."""

_LARGEST_NORM = torch.finfo(torch.float32).max / 2
"""No vector may be longer: its rotated elements must be float32, whatever is rounded."""


class Segments:
    """One sequence: which strategy each of its tokens has.

    Attributes:
        strategies: rows of the strategy tables, one for each finished segment whose own serves.
    """

    def __init__(self, memory: PackedMemory, slot: int) -> None:
        self.strategies: list[int] = []
        self._memory, self._store, self._slot = memory, memory.store, slot
        self._compression, self._layers = memory.compression, range(memory.model.layers)
        self._first = 0  # where the segment begins
        # Where the last segment began, and its own strategy, until it serves.
        self._finished: tuple[int, Future[tuple[Tensor, Tensor]]] | None = None
        self._loss = Readback()  # of the segment, but for its newest eighth
        buffers = memory.compression.longest // BUFFER_TOKENS
        self._losses = torch.zeros(
            (buffers, memory.model.layers, 2, memory.model.kv_heads),
            dtype=torch.float64,
            device=memory.store.numbers.device,
        )
        memory.store.strategy_of[slot].fill_(-1)
        memory.store.rows[slot].fill_(-1)

    def at_once(self, start: int, stop: int) -> int:
        """Where tokens from `start` on must end to be given to `append`, of those up to `stop`."""
        complete = start // BUFFER_TOKENS * BUFFER_TOKENS
        if stop < complete + BUFFER_TOKENS:
            return stop
        last, step = OPENING_TOKENS, self._compression.step
        if self.strategies:
            last = self._first + (complete - self._first) // step * step + step
        return min(last, stop) // BUFFER_TOKENS * BUFFER_TOKENS

    def append(self, pages: Tensor, layers: range, start: int, stop: int) -> None:
        """Account for the next tokens of some layers, which are in the ring.

        They are one token, or end where `at_once` says. All layers, the last ones last, take them
        over before any takes others.

        Raises:
            ValueError: a token of a complete buffer is not finite.
        """
        if stop % BUFFER_TOKENS:
            return
        first = start // BUFFER_TOKENS * BUFFER_TOKENS
        self._require_finite(layers, first, stop)
        if self.strategies:
            if layers.start == 0:
                self._assign(first, stop, len(self.strategies) - 1)
            losses = self._losses[(first - self._first) // BUFFER_TOKENS :]
            place = (self._slot, self.strategies[-1], layers)
            compress_buffers(self._store, pages, *place, first, stop, losses)
        if layers.stop == self._layers.stop:
            self._advance(pages, stop)

    def end(self) -> None:
        """Compute nothing more for the sequence, and hold nothing of it."""
        if self._finished is not None:
            self._finished[1].cancel()
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
        if not self.strategies:
            if length == OPENING_TOKENS:  # which waits for no other sequence's
                self._memory.not_finite.check(wait=True)
                found, self._first = self._find(0, resident), resident
                self._switch(pages, 0, *found)
        elif length % compression.step == 0:
            if self._finished is not None:
                first, result = self._finished
                self._switch(pages, first, *result.result())
                self._finished = None
            if length >= compression.shortest and (length == compression.longest or self._lossy()):
                result = self._memory.submit(partial(self._find, self._first, resident))
                self._finished, self._first = (self._first, result), resident
                self._losses.zero_()
            else:
                self._loss.start(self._losses.sum() / self._losses[0].numel())

    def _lossy(self) -> bool:
        loss = self._loss.wait()
        return loss is not None and float(loss) > self._compression.threshold

    def _find(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Find the own strategies of tokens [first, last)."""
        tokens_of = partial(self._store.newest, self._slot, first=first, last=last)
        return find_strategies(tokens_of, self._layers, self._compression)

    def _switch(self, pages: Tensor, first: int, numbers: Tensor, rotations: Tensor) -> None:
        """Let the own strategy of the segment from `first` on serve it, and tokens that follow."""
        row, last, store = self._memory.free_rows.pop(), self._first, self._store
        (on_device,) = upload((numbers,), store.numbers.device)
        store.numbers[row].copy_(on_device)
        store.rotations[row].copy_(rotations)
        if rotations.is_cuda:
            rotations.record_stream(torch.cuda.current_stream())
        store.rows[self._slot, len(self.strategies)].fill_(row)
        self._assign(first, last, len(self.strategies))
        compress_buffers(store, pages, self._slot, row, self._layers, first, last)
        self.strategies.append(row)
