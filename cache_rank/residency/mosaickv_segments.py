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

A sequence that is truncated forgets tokens of two buffers at most. What followed from the newest
complete one is undone by going back to the state before it, which is kept until the next.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.pages import ROLLBACK_TOKENS
from cache_rank.residency.mosaickv_strategy import (
    Candidates,
    CompressedTokens,
    Strategy,
    compress,
    recompress,
)

BUFFER_TOKENS = 32
"""Newest tokens that wait in full precision until they are so many (section 5.3)."""

assert BUFFER_TOKENS >= ROLLBACK_TOKENS, "or truncation might undo two buffers"

OPENING_TOKENS = 256
"""Tokens of the first segment, which has no previous strategy."""

_LARGEST_NORM = torch.finfo(torch.float32).max / 2
"""Of a vector, so that its rotated elements are float32 whatever is rounded."""


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


class Write(NamedTuple):
    """Tokens to be written to the pages, over what is there.

    Attributes:
        layer: that they are of.
        first: position of the first.
        tokens: as compressed by the strategy that is now theirs.
    """

    layer: int
    first: int
    tokens: CompressedTokens


class Run(NamedTuple):
    """Successive tokens of one strategy, positions first to last - 1."""

    first: int
    last: int
    strategy: Strategy


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
        covariance: (2, Hkv, D, D) float64 of each layer, of that segment's keys and values.
        strategies: of each finished segment whose own serves, for each layer.
        strategy_of: for each buffer in the pages, which of them.
        recompression: under way.
        first_original: that is still needed in full precision.
    """

    tokens: int
    first: int
    losses: Tensor
    covariance: list[Tensor]
    strategies: list[list[Strategy]] = dataclasses.field(default_factory=list)
    strategy_of: list[int] = dataclasses.field(default_factory=list)
    recompression: _Recompression | None = None
    first_original: int = 0

    def copied(self) -> _State:
        """Changes of either do not show in the other; tensors but for losses are never changed."""
        return dataclasses.replace(
            self,
            losses=self.losses.clone(),
            covariance=list(self.covariance),
            strategies=list(self.strategies),
            strategy_of=list(self.strategy_of),
        )


class Segments:
    """One sequence: which strategy each of its tokens has, and those that are not in the pages.

    Attributes:
        resident: tokens of each layer.
    """

    def __init__(
        self,
        model: ModelShape,
        candidates: Candidates,
        lengths: SegmentLengths,
        executor: Executor,
    ) -> None:
        self.resident = [0] * model.layers
        self._model = model
        self._candidates = candidates
        self._lengths = lengths
        self._executor = executor
        self._originals: list[Tensor] = []  # buffers, (2, layers, Hkv, BUFFER_TOKENS, D) each
        self._first_original = 0
        self._state = _State(0, 0, self._no_losses(), self._no_covariance())
        self._before = self._state
        """Without the newest complete buffer."""

    def _no_losses(self) -> Tensor:
        return torch.zeros(self._model.layers, dtype=torch.float64)

    def _no_covariance(self) -> list[Tensor]:
        model = self._model
        shape = (2, model.kv_heads, model.head_dim, model.head_dim)
        return [torch.zeros(shape, dtype=torch.float64)] * model.layers

    def packed_tokens(self, layer: int) -> int:
        """How many of a layer's tokens are in the pages; the rest is in `newest`."""
        complete = self.resident[layer] // BUFFER_TOKENS * BUFFER_TOKENS
        return complete if self._state.strategies else 0

    def newest(self, layer: int, first: int, last: int) -> Tensor:
        """Tokens that are not in the pages, as they came: (2, Hkv, last - first, D)."""
        start = first - first % BUFFER_TOKENS
        buffers = [self._buffer(position) for position in range(start, last, BUFFER_TOKENS)]
        tokens = [buffer[:, layer] for buffer in buffers]
        return torch.cat(tokens, dim=2)[:, :, first - start : last - start]

    def runs(self, layer: int, last: int, longest: int) -> Iterator[Run]:
        """The strategies of a layer's tokens in the pages before `last`, in order.

        Args:
            layer: whose.
            last: at most `packed_tokens`.
            longest: tokens of a run, a multiple of BUFFER_TOKENS.
        """
        first = 0
        buffers = self._state.strategy_of[: -(-last // BUFFER_TOKENS)]
        for index, group in itertools.groupby(buffers):
            end = min(first + sum(BUFFER_TOKENS for _ in group), last)
            for start in range(first, end, longest):
                strategy = self._state.strategies[index][layer]
                yield Run(start, min(start + longest, end), strategy)
            first = end

    def strategies(self, layer: int, positions: Tensor) -> Iterator[tuple[Tensor, Strategy]]:
        """Each strategy of some tokens in the pages, and which of them, as indices."""
        state = self._state
        of_token = torch.tensor(state.strategy_of)[positions // BUFFER_TOKENS]
        for index in of_token.unique().tolist():
            yield (of_token == index).nonzero().squeeze(-1), state.strategies[index][layer]

    def append(self, layers: range, first: int, tokens: Tensor) -> list[Write]:
        """Take over the next tokens of some layers, which end with a buffer or before.

        Args:
            layers: whose. All layers take one token over before any takes another buffer.
            first: position of the first.
            tokens: (2, len(layers), Hkv, n, D), keys and values.

        Returns:
            What is to be written to the pages, now.

        Raises:
            ValueError: a token of a complete buffer is not finite.
        """
        resident, entry = first + tokens.shape[3], first % BUFFER_TOKENS
        group = slice(layers.start, layers.stop)
        buffer = self._buffer(first)
        buffer[:, group, :, entry : entry + tokens.shape[3]] = tokens
        self.resident[group] = [resident] * len(layers)
        if resident % BUFFER_TOKENS:
            return []
        _refuse_not_finite(buffer[:, group], layers)
        if self._state.tokens < resident:  # the first layers that get here
            self._drop_originals()
            self._before, self._state = self._state, self._state.copied()
            self._state.tokens = resident
        writes = []
        for layer in layers:
            writes += self._compress(layer, resident - BUFFER_TOKENS, buffer[:, layer])
        if min(self.resident) == resident:
            writes += self._advance(resident)
        return writes

    def truncate(self, tokens: int) -> list[Write]:
        """Forget all but the first tokens, at most ROLLBACK_TOKENS fewer than there ever were.

        Returns:
            What is to be written to the pages, now.
        """
        self.resident = [tokens] * self._model.layers
        if tokens >= self._state.tokens:
            return []
        undone, self._state = self._state, self._before
        if undone.recompression is not self._state.recompression:
            _cancel(undone.recompression)
        if len(undone.strategies) == len(self._state.strategies) or not self._state.strategies:
            return []
        return self._by_former_strategies(self._state.recompression)

    def _by_former_strategies(self, finished: _Recompression | None) -> list[Write]:
        """A finished segment as it was compressed before its own strategy served."""
        assert finished is not None
        state, writes = self._state, []
        for first in range(finished.first, finished.last, BUFFER_TOKENS):
            strategies = state.strategies[state.strategy_of[first // BUFFER_TOKENS]]
            for layer, strategy in enumerate(strategies):
                writes.append(
                    Write(layer, first, compress(self._buffer(first)[:, layer], strategy))
                )
        return writes

    def end(self) -> None:
        """Compute nothing more for the sequence."""
        _cancel(self._state.recompression)

    def _buffer(self, position: int) -> Tensor:
        model = self._model
        index = (position - self._first_original) // BUFFER_TOKENS
        if index == len(self._originals):
            shape = (2, model.layers, model.kv_heads, BUFFER_TOKENS, model.head_dim)
            self._originals.append(torch.empty(shape, dtype=model.torch_dtype))
        return self._originals[index]

    def _drop_originals(self) -> None:
        """Those that not even the state before the next buffer needs."""
        del self._originals[: (self._state.first_original - self._first_original) // BUFFER_TOKENS]
        self._first_original = self._state.first_original

    def _compress(self, layer: int, first: int, buffer: Tensor) -> list[Write]:
        """Account for a complete buffer, (2, Hkv, BUFFER_TOKENS, D), and compress it."""
        state, exact = self._state, buffer.double()
        state.covariance[layer] = state.covariance[layer] + exact.transpose(-1, -2) @ exact
        if not state.strategies:
            return []
        if len(state.strategy_of) == first // BUFFER_TOKENS:  # the first layer that gets here
            state.strategy_of.append(len(state.strategies) - 1)
        tokens = compress(buffer, state.strategies[-1][layer])
        state.losses[layer] += tokens.loss.sum()
        return [Write(layer, first, tokens)]

    def _advance(self, resident: int) -> list[Write]:
        """All layers have so many tokens, in complete buffers."""
        state = self._state
        if self._is_finished(resident - state.first):
            self._finish(resident)
        if state.recompression is not None and state.recompression.due == resident:
            return self._switch(state.recompression)
        return []

    def _is_finished(self, length: int) -> bool:
        if not self._state.strategies:
            return length == OPENING_TOKENS
        lengths = self._lengths
        is_lossy = float(self._state.losses.mean()) > lengths.threshold
        return length == lengths.most or (length >= lengths.least and is_lossy)

    def _finish(self, last: int) -> None:
        state = self._state
        start, stop = (
            (position - self._first_original) // BUFFER_TOKENS for position in (state.first, last)
        )
        result = self._executor.submit(
            recompress, self._originals[start:stop], state.covariance, self._candidates
        )
        due = last + self._lengths.delay if state.strategies else last
        state.recompression = _Recompression(state.first, last, due, result)
        state.first, state.losses, state.covariance = last, self._no_losses(), self._no_covariance()

    def _switch(self, finished: _Recompression) -> list[Write]:
        """Let the finished segment's own strategy serve; the copy of its tokens is not needed."""
        state, layers = self._state, finished.result.result()
        first, last = finished.first // BUFFER_TOKENS, finished.last // BUFFER_TOKENS
        state.strategy_of[first:last] = [len(state.strategies)] * (last - first)
        state.strategies.append([tokens.strategy for tokens in layers])
        state.first_original = finished.last
        state.recompression = None
        return [Write(layer, finished.first, tokens) for layer, tokens in enumerate(layers)]


def _cancel(recompression: _Recompression | None) -> None:
    if recompression is not None:
        recompression.result.cancel()


def _refuse_not_finite(buffer: Tensor, layers: range) -> None:
    """Refuse keys and values, (2, len(layers), Hkv, BUFFER_TOKENS, D), that cannot be rotated."""
    norms = buffer.double().square().sum(dim=-1).sqrt()
    refused = ~(norms <= _LARGEST_NORM)
    if refused.any():
        part, layer, head, _ = refused.nonzero()[0].tolist()
        raise ValueError(
            f"{('keys', 'values')[part]} of layer {layers.start + layer}, kv head {head} are not "
            "finite, or span more than float32"
        )
