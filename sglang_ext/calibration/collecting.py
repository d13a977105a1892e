"""Collects, in a server that prefills texts, what forecasts and sketches are fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.kernels.rotary.reference import rotate_to
from sglang_ext.calibration.files import Source
from sglang_ext.calibration.fitting import NormalEquations
from sglang_ext.calibration.key_statistics import KeyMoments
from sglang_ext.projections import DecoderLayer, watch_inputs

_PIECE_TOKENS = 512
"""So many neighbouring tokens stay neighbours."""

_GOLDEN_RATIO = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly, however many there are."""


class Collector:
    """Normal equations of every layer that is forecast, of what a model prefills.

    Attributes:
        equations: by layer, of the tokens since `begin_part`.
    """

    def __init__(self, layers: Sequence[DecoderLayer], sources: Mapping[int, Source]) -> None:
        self.equations: dict[int, NormalEquations] = {}
        self._layers, self._sources = layers, sources
        self._grams: dict[int, Tensor] = {}
        self._states: dict[int, Tensor] = {}
        self._queries: dict[int, Tensor] = {}  # until what enters a later layer tells the next ones
        self._told_next = {
            source.layer: [layer for layer in sources if sources[layer] == source]
            for source in sources.values()
            if source.is_before
        }
        self._watched = sorted({source.layer for source in sources.values()})
        watch_inputs([layers[source] for source in self._watched], self._on_input)
        for layer in sources:
            layers[layer].projection.register_forward_hook(
                lambda _module, _inputs, output, layer=layer: self._on_queries(layer, output)
            )

    def begin_part(self) -> dict[int, NormalEquations]:
        """Begin to collect anew; what has been collected."""
        collected = self.equations
        self.equations, self._grams, self._states = {}, {}, {}
        return collected

    def _on_input(self, index: int, hidden: Tensor, residual: Tensor | None, batch: Any) -> None:
        source = self._watched[index]
        self._states.pop(source, None)
        if not batch.forward_mode.is_extend():
            return
        state = hidden.float() if residual is None else hidden.float() + residual.float()
        epsilon = self._layers[source].input_norm.variance_epsilon
        state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + epsilon)
        state = torch.cat((state, state.new_ones((len(state), 1))), dim=1)
        told_next = self._told_next.get(source, [])
        if told_next:  # whose source is no other layer's
            state = state[:-1]
        if source not in self._grams:
            self._grams[source] = state.new_zeros((state.shape[1], state.shape[1]))
        self._grams[source].addmm_(state.T, state)
        self._states[source] = state
        for layer in told_next:
            self._add(layer, state, self._queries.pop(layer)[1:])

    def _on_queries(self, layer: int, output: Any) -> None:
        source = self._sources[layer]
        projected = output[0] if isinstance(output, tuple) else output
        of_layer = self._layers[layer]
        queries = projected[:, : of_layer.query_heads * of_layer.head_dim].float()
        if source.is_before:
            self._queries[layer] = queries
        elif (state := self._states.get(source.layer)) is not None:
            self._add(layer, state, queries)

    def _add(self, layer: int, state: Tensor, queries: Tensor) -> None:
        if layer not in self.equations:
            gram = self._grams[self._sources[layer].layer]
            self.equations[layer] = NormalEquations(gram, queries.shape[1])
        self.equations[layer].add(state, queries)


class KeyCollector:
    """Moments of the queries and keys of layers, of what a model prefills until it is stopped.

    Pieces of it are rotated on, to positions from the whole context: rotary embedding turns some
    directions so slowly that the beginning of a context shows nothing of them.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], first: int, shape: ModelShape, context: int
    ) -> None:
        """Collect from the layer `first` on.

        Args:
            shape: of the model, which says how it rotates.
            context: tokens.
        """
        self.moments: dict[int, KeyMoments] = {}
        self._is_on = True
        self._shape, self._context = shape, context
        for layer in range(first, len(layers)):
            layers[layer].attention.register_forward_pre_hook(
                lambda _module, inputs, layer=layer: self._on_attention(layer, *inputs)
            )
        self._layers = layers

    def stop(self) -> None:
        self._is_on = False

    def _on_attention(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, batch: Any, *_: Any
    ) -> None:
        if not self._is_on or not batch.forward_mode.is_extend():
            return
        head_dim = self._layers[layer].head_dim
        by_head = keys.view(len(keys), -1, head_dim)
        if layer not in self.moments:
            self.moments[layer] = KeyMoments(by_head.shape[1], head_dim, keys.device)
        of_heads, held = queries.view(len(queries), -1, head_dim), self.moments[layer]
        for start in range(0, len(keys), _PIECE_TOKENS):
            piece = slice(start, start + _PIECE_TOKENS)
            parts = of_heads[piece], by_head[piece], batch.positions[piece]
            held.add(*self._move(*parts, held.tokens // _PIECE_TOKENS))

    def _move(
        self, queries: Tensor, keys: Tensor, positions: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Rotate a piece to where it stands in the context by its number; all are spread evenly."""
        if (frequency := self._shape.frequency(keys.device)) is None:
            return queries, keys
        target = number * _GOLDEN_RATIO % 1 * max(0, self._context - len(keys))
        by = (int(target) - positions[:1]).expand(len(keys))
        how = by, frequency, self._shape.rotary_interleaved, 1.0
        return rotate_to(queries.float(), *how), rotate_to(keys.float(), *how)
