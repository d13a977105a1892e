"""How many of the tokens that a layer's true queries select its forecasts select too, of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.forecast import forecast_layer
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.kernels.select.reference import top_tokens
from cache_rank.measure.recall import overlap_ratio
from sglang_ext.calibration.files import Source
from sglang_ext.projections import DecoderLayer, watch_inputs

SELECTED = 128
"""So many tokens are selected, or a quarter of the text where that is less."""

POSITIONS = 32
"""So many of the last positions of a text are looked at."""

_SINKS, _RECENT = 4, 64
"""As many first and newest tokens are attended to anyway, and do not compete."""


class HeldOutRecall:
    """The recall of forecasts, of texts that are prefilled whole.

    Attributes:
        shares: by layer, of each position and KV head so far.
    """

    def __init__(
        self,
        model: ModelShape,
        layers: Sequence[DecoderLayer],
        sources: Mapping[int, Source],
        projections: Mapping[int, Tensor],
    ) -> None:
        """Watch a loaded model.

        Args:
            model: its shape.
            layers: its decoder layers.
            sources: what tells the queries, of each that is forecast.
            projections: by what these are forecast, (H + 2, Hq, D); see protocol.QueryProjection.
        """
        self.shares: dict[int, list[Tensor]] = {layer: [] for layer in sources}
        self._model, self._sources, self._projections = model, sources, projections
        self._states: dict[int, Tensor] = {}
        self._attentions: dict[int, tuple[Tensor, Tensor]] = {}  # whose source is to come
        self._told_next = [layer for layer, source in sources.items() if source.is_before]
        self._watched = sorted({source.layer for source in sources.values()})
        watch_inputs([layers[source] for source in self._watched], self._on_input)
        for layer in sources:
            layers[layer].attention.register_forward_pre_hook(
                lambda _module, inputs, layer=layer: self._on_attention(layer, *inputs[:2])
            )

    def mean(self, layer: int) -> float | None:
        """The mean of a layer; None where no text was long enough."""
        shares = self.shares[layer]
        return float(torch.cat(shares).mean()) if shares else None

    def _on_input(self, index: int, hidden: Tensor, residual: Tensor | None, batch: Any) -> None:
        source = self._watched[index]
        self._states.pop(source, None)
        if not batch.forward_mode.is_extend():
            return
        newest = slice(-POSITIONS - 1, None)
        state = hidden[newest].float()
        self._states[source] = state if residual is None else state + residual[newest]
        for layer in self._told_next:
            if self._sources[layer].layer == source:
                self._compare(layer, self._states[source][:-1], *self._attentions.pop(layer))

    def _on_attention(self, layer: int, queries: Tensor, keys: Tensor) -> None:
        source = self._sources[layer]
        if source.is_before:
            self._attentions[layer] = queries, keys
        elif (state := self._states.get(source.layer)) is not None:
            self._compare(layer, state[-POSITIONS:], queries, keys)

    def _compare(self, layer: int, state: Tensor, queries: Tensor, keys: Tensor) -> None:
        model, tokens = self._model, keys.shape[0]
        if tokens < _SINKS + _RECENT + POSITIONS + 4:
            return
        positions = torch.arange(tokens - len(state), tokens, device=state.device)
        heads = (model.query_heads, model.head_dim)
        true = queries[-len(state) :].view(-1, *heads).float()
        expected = forecast_layer(model, self._projections[layer], state, positions)
        by_head = keys.view(tokens, -1, model.head_dim).transpose(0, 1)
        for position, *pair in zip(positions.tolist(), true, expected, strict=True):
            older = by_head[None, :, :position]
            candidates = range(_SINKS, position - _RECENT)
            count = min(SELECTED, len(candidates) // 4)
            exact, forecast = (
                top_tokens(score_tokens(query[None], older, model.scale), candidates, count)
                for query in pair
            )
            recall = overlap_ratio(forecast, exact, position)
            self.shares[layer].append(recall.flatten().cpu())
