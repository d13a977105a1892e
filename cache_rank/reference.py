"""The synchronous reference: the whole algorithm in one process, head by head, in plain torch.

It is what the asynchronous system must equal, selection for selection, and it is meant to be read.
A decode step at position t of one layer attends to

    sinks [0, s)  +  tokens chosen after step t - 1  +  the newest r predecessors  +  token t

and then chooses the tokens of step t + 1 from everything older than its recent window. Where its
query is forecast, the tokens are chosen in step t itself, before token t is appended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.forecast import forecast_layer
from cache_rank.kernels.predict.reference import predict_next_query
from cache_rank.kernels.rotary.reference import align_to_next_position
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.kernels.sketch.reference import (
    attended_normalizer,
    encode_keys,
    make_sketch,
    query_weights,
    sketch_shape,
    unpack_int2,
)


class SynchronousReference:
    """One request: all its K and V, its queries, and which token sits in which slot."""

    def __init__(self, config: CacheRankConfig, keys: Tensor, values: Tensor) -> None:
        """Start with the tokens of the bulk shipment, (layers, n, Hkv, D) each."""
        self.config = config
        self.keys = [layer.transpose(0, 1) for layer in keys]  # per layer (Hkv, T, D)
        self.values = [layer.transpose(0, 1) for layer in values]
        self.queries: list[list[Tensor]] = [[] for _ in keys]  # per layer, newest first, (Hq, D)
        empty: list[int | None] = [None] * config.sparse_budget
        self.slots = [[list(empty) for _ in range(config.model.kv_heads)] for _ in keys]
        self.projections: dict[int, Tensor] = {}  # of layers that are forecast, (H + 2, Hq, D)
        self.bases: dict[int, Tensor] = {}  # of layers whose keys are sketched, (Hkv, D + 1, D)

    def append(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Add the newest token to one layer: query (Hq, D), key and value (Hkv, D)."""
        self.keys[layer] = torch.cat((self.keys[layer], key.unsqueeze(1)), dim=1)
        self.values[layer] = torch.cat((self.values[layer], value.unsqueeze(1)), dim=1)
        window = [query.float(), *self.queries[layer]]
        self.queries[layer] = window[: self.config.query_window + 1]

    def attended(self, layer: int, kv_head: int, position: int) -> list[int]:
        """Positions that the step at `position` attends to, in ascending order."""
        config = self.config
        first_recent = max(config.sink_tokens, position - config.recent_tokens)
        chosen = [token for token in self.slots[layer][kv_head] if token is not None]
        always = [*range(min(config.sink_tokens, position + 1)), *range(first_recent, position + 1)]
        return sorted(chosen + always)

    def attend(self, layer: int, query: Tensor, position: int) -> Tensor:
        """Attention output (Hq, D) float32 of the step at `position`, whose token is appended."""
        group = query.shape[0] // self.config.model.kv_heads
        outputs = []
        for kv_head in range(self.config.model.kv_heads):
            index = torch.tensor(self.attended(layer, kv_head, position))
            keys = self.keys[layer][kv_head, index].float()
            values = self.values[layer][kv_head, index].float()
            heads = query[kv_head * group : (kv_head + 1) * group].float()
            probability = (heads @ keys.T * self.config.model.scale).softmax(-1)
            outputs.append(probability @ values)
        return torch.cat(outputs)

    def select(self, layer: int, position: int, hidden: Tensor | None = None) -> None:
        """Choose the tokens of the step after `position`, that of the newest token, in one layer.

        `hidden`, (H,), entered a later layer in this step, if that tells the query.
        """
        if hidden is None or layer not in self.projections:
            queries = self.predict(layer)
        else:
            queries = self.forecast(layer, hidden, position + 1)
        self._choose(layer, queries, position)

    def select_now(self, layer: int, hidden: Tensor, position: int) -> None:
        """Choose the tokens of the step at `position` in one layer, whose token is to come.

        `hidden`, (H,), entered an earlier layer in this step.
        """
        self._choose(layer, self.forecast(layer, hidden, position), position - 1)

    def _choose(self, layer: int, queries: Tensor, position: int) -> None:
        """Choose tokens by queries (Hq, D) when the newest one is at `position`."""
        model = self.config.model
        scores = self._score(layer, queries)
        for kv_head in range(model.kv_heads):
            self._fill_slots(self.slots[layer][kv_head], scores[0, kv_head].tolist(), position)

    def _score(self, layer: int, queries: Tensor) -> Tensor:
        """Score all tokens by queries (Hq, D): (1, Hkv, T)."""
        keys, scale = self.keys[layer].unsqueeze(0), self.config.model.scale
        if layer not in self.bases:
            return score_tokens(queries.unsqueeze(0), keys, scale)
        basis = self.bases[layer].unsqueeze(0)
        shape = sketch_shape(self.config.model.head_dim, self.config.sketch_bits)
        sketch = make_sketch(basis[:, :, :-1], basis[:, :, -1], shape)
        weights = query_weights(queries.unsqueeze(0), sketch, scale)
        logits = weights @ unpack_int2(encode_keys(keys, sketch, shape)).mT
        normalizer = logits.logsumexp(-1, keepdim=True)
        if self.config.score_normalizer == "attended":
            chosen = [
                [-1 if token is None else token for token in slots] for slots in self.slots[layer]
            ]
            always = (self.config.sink_tokens, self.config.recent_tokens)
            normalizer = attended_normalizer(logits, torch.tensor([chosen]), *always)
        return (logits - normalizer).amax(-2)

    def predict(self, layer: int) -> Tensor:
        """The query (Hq, D) float32 that the step to come is expected to have in one layer."""
        config, window = self.config, self.queries[layer]
        padding = [torch.zeros_like(window[0])] * (config.query_window + 1 - len(window))
        queries = torch.stack(window + padding, dim=1)  # (Hq, W + 1, D)
        if config.model.rotary_frequency:
            frequency = torch.tensor(config.model.rotary_frequency)
            queries = align_to_next_position(queries, frequency, config.model.rotary_interleaved)
        return predict_next_query(queries, torch.tensor([len(window)]), config.history_predictor)

    def forecast(self, layer: int, hidden: Tensor, position: int) -> Tensor:
        """The query (Hq, D) float32 that a hidden state (H,) promises the step at `position`."""
        projection = self.projections[layer]
        return forecast_layer(
            self.config.model, projection, hidden[None], torch.tensor([position])
        )[0]

    def _fill_slots(self, slots: list[int | None], scores: list[float], position: int) -> None:
        config = self.config
        candidates = config.candidates_after(position)
        ranking = sorted(candidates, key=lambda token: (scores[token], token), reverse=True)
        rank = {token: place for place, token in enumerate(ranking)}

        budget = config.budget_after(position)
        stays = budget + config.hysteresis * budget // config.sparse_budget
        kept = {token for token in slots if token is not None and rank[token] < stays}
        wanted = min(budget, len(ranking)) - len(kept)
        resident = {token for token in slots if token is not None}
        entering = [token for token in ranking if token not in resident]
        entering = sorted(entering[: max(0, min(wanted, config.max_swap_tokens))])

        empty = [slot for slot, token in enumerate(slots[:budget]) if token is None]
        fallen = [
            (rank[token], slot)
            for slot, token in enumerate(slots)
            if token is not None and token not in kept
        ]
        # Where not all of these can leave, the last of the ranking do.
        last = sorted(fallen, reverse=True)[: max(0, len(entering) - len(empty))]
        leaving = sorted(slot for _, slot in last)
        for token, slot in zip(entering, empty + leaving, strict=False):
            slots[slot] = token
