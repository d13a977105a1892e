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
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.residency.mosaickv_strategy import (
    Candidates,
    CompressedTokens,
    Strategy,
    compress,
)

BUFFER_TOKENS = 32
"""Newest tokens that wait in full precision until they are so many (section 5.3)."""

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
        return self.most + self.delay


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
        self._strategies: list[list[Strategy]] = []  # of each finished segment, for each layer
        self._strategy_of: list[int] = []  # for each buffer in the pages
        self._recompression: _Recompression | None = None
        self._begin_segment(0)

    def _begin_segment(self, first: int) -> None:
        model = self._model
        self._first = first
        self._losses = torch.zeros(model.layers, dtype=torch.float64)
        self._covariance = torch.zeros(
            (model.layers, 2, model.kv_heads, model.head_dim, model.head_dim), dtype=torch.float64
        )

    def packed_tokens(self, layer: int) -> int:
        """How many of a layer's tokens are in the pages; the rest is in `newest`."""
        return self.resident[layer] // BUFFER_TOKENS * BUFFER_TOKENS if self._strategies else 0

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
        buffers = self._strategy_of[: -(-last // BUFFER_TOKENS)]
        for index, group in itertools.groupby(buffers):
            end = min(first + sum(BUFFER_TOKENS for _ in group), last)
            for start in range(first, end, longest):
                yield Run(start, min(start + longest, end), self._strategies[index][layer])
            first = end

    def strategies(self, layer: int, positions: Tensor) -> Iterator[tuple[Tensor, Strategy]]:
        """Each strategy of some tokens in the pages, and which of them, as indices."""
        of_token = torch.tensor(self._strategy_of)[positions // BUFFER_TOKENS]
        for index in of_token.unique().tolist():
            yield (of_token == index).nonzero().squeeze(-1), self._strategies[index][layer]

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
        writes = []
        for layer in layers:
            writes += self._compress(layer, resident - BUFFER_TOKENS, buffer[:, layer])
        if min(self.resident) == resident:
            writes += self._advance(resident)
        return writes

    def end(self) -> None:
        """Compute nothing more for the sequence."""
        if self._recompression is not None:
            self._recompression.result.cancel()

    def _buffer(self, position: int) -> Tensor:
        model = self._model
        index = (position - self._first_original) // BUFFER_TOKENS
        if index == len(self._originals):
            shape = (2, model.layers, model.kv_heads, BUFFER_TOKENS, model.head_dim)
            self._originals.append(torch.empty(shape, dtype=model.torch_dtype))
        return self._originals[index]

    def _compress(self, layer: int, first: int, buffer: Tensor) -> list[Write]:
        """Account for a complete buffer, (2, Hkv, BUFFER_TOKENS, D), and compress it."""
        exact = buffer.double()
        self._covariance[layer] += exact.transpose(-1, -2) @ exact
        if not self._strategies:
            return []
        if len(self._strategy_of) == first // BUFFER_TOKENS:  # the first layer that gets here
            self._strategy_of.append(len(self._strategies) - 1)
        tokens = compress(buffer, self._strategies[-1][layer])
        self._losses[layer] += tokens.loss.sum()
        return [Write(layer, first, tokens)]

    def _advance(self, resident: int) -> list[Write]:
        """All layers have so many tokens, in complete buffers."""
        if self._is_finished(resident - self._first):
            self._finish(resident)
        if self._recompression is not None and self._recompression.due == resident:
            return self._switch(self._recompression)
        return []

    def _is_finished(self, length: int) -> bool:
        if not self._strategies:
            return length == OPENING_TOKENS
        lengths = self._lengths
        is_lossy = float(self._losses.mean()) > lengths.threshold
        return length == lengths.most or (length >= lengths.least and is_lossy)

    def _finish(self, last: int) -> None:
        start, stop = (
            (position - self._first_original) // BUFFER_TOKENS for position in (self._first, last)
        )
        result = self._executor.submit(
            recompress, self._originals[start:stop], self._covariance, self._candidates
        )
        due = last + self._lengths.delay if self._strategies else last
        self._recompression = _Recompression(self._first, last, due, result)
        self._begin_segment(last)

    def _switch(self, finished: _Recompression) -> list[Write]:
        """Let the finished segment's own strategy serve, and drop the copy of its tokens."""
        layers = finished.result.result()
        first, last = finished.first // BUFFER_TOKENS, finished.last // BUFFER_TOKENS
        self._strategy_of[first:last] = [len(self._strategies)] * (last - first)
        self._strategies.append([tokens.strategy for tokens in layers])
        del self._originals[: last - self._first_original // BUFFER_TOKENS]
        self._first_original = finished.last
        self._recompression = None
        return [Write(layer, finished.first, tokens) for layer, tokens in enumerate(layers)]


def recompress(
    buffers: list[Tensor], covariance: Tensor, candidates: Candidates
) -> list[CompressedTokens]:
    """Choose the strategies of a finished segment, and compress it by them.

    Args:
        buffers: (2, layers, Hkv, BUFFER_TOKENS, D) each, all of its tokens.
        covariance: (layers, 2, Hkv, D, D) float64, of its keys and values.
        candidates: to choose from.

    Returns:
        Of each layer.
    """
    found = []
    for layer, of_layer in enumerate(covariance):
        tokens = torch.cat([buffer[:, layer] for buffer in buffers], dim=2)
        found.append(compress(tokens, candidates.choose(tokens, of_layer)))
    return found


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
