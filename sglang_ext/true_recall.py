"""Recall by the keys as they came, which `--inference-kv full` leaves in SGLang's pool.

Two halves of a measured step meet here. Scores by its true queries and the true keys are queued
right behind its forward pass, on the same stream: what they read is written by later work of that
stream only. Which tokens sat in its slots is known to the cache rank, whose measurement brings them
a step or so later. What remains is queued on a stream of its own, beside decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache_rank.channels.control import MAX_FRAME_BYTES
from cache_rank.config import CacheRankConfig
from cache_rank.copies import Readback, upload
from cache_rank.kernels.baselines.reference import Budget
from cache_rank.measure.recall import measure_recall
from cache_rank.operations import implementation_for
from cache_rank.protocol import Measurement
from sglang_ext.lifecycle import SparseSequence

MOST_WAITING = 4
"""At most so many scorings wait for their measurements; when there are more, the oldest is dropped.

Measurements follow their steps closely, so that this many are under way when every step is
measured, and one otherwise.
"""

_FEWEST_SCORES = 4096
"""Buffers of scores have room for so many tokens at least: from there on, all are scored by the
same build of the kernel."""

_ROUNDING = 64
"""The room is a multiple of this, so that each layer's scores are aligned alike."""

_RANKING_BYTES = 48
"""Ranking a token by a score takes so many bytes at most: keys of 8 bytes, and a few copies."""


def score_bytes(config: CacheRankConfig, context_length: int) -> int:
    """Return the bytes that measuring by true keys takes at most."""
    model = config.model
    scores = max(map(len, config.groups)) * model.kv_heads
    token = (
        scores * (4 * MOST_WAITING + _RANKING_BYTES) + 4 * model.query_heads
    )  # logits of a layer
    return token * max(_FEWEST_SCORES, context_length)


class _Scored(NamedTuple):
    """The inference rank's half of a measured step.

    Attributes:
        sequence: the request.
        position: position of the token that was computed.
        layers: the layers of the group.
        scores: (L, Hkv, >= position) float32; only those of candidates mean something.
        done: when they are there; None on a CPU.
    """

    sequence: SparseSequence
    position: int
    layers: range
    scores: Tensor
    done: torch.cuda.Event | None


class TrueRecall:
    """Scores measured steps by the keys in the pool, and compares the slots with the best."""

    def __init__(
        self, config: CacheRankConfig, req_to_token: Tensor, keys: Sequence[Tensor]
    ) -> None:
        """Read SGLang's pool.

        Args:
            config: agreed with the cache rank.
            req_to_token: (request slots, context length) int32 pool rows.
            keys: of each sparse layer, (pool rows, Hkv, D).

        Raises:
            ValueError: no message holds the slots of a layer group.
        """
        model = config.model
        slots = max(map(len, config.groups)) * model.kv_heads * config.sparse_budget
        if 4 * slots > MAX_FRAME_BYTES // 2:
            raise ValueError(
                f"recall_interval {config.recall_interval} needs the slots of a layer group in one "
                f"message, and there are {slots}: lower --layers-per-group, or set "
                "--recall-interval 0"
            )
        self._config = config
        self._req_to_token = req_to_token
        self._keys = keys
        self._device = req_to_token.device
        kind = implementation_for(self._device)
        self._kernels: Any = import_module(f"cache_rank.kernels.baselines.{kind}")
        # Candidates are relative to the newest token that is scored: the one before the current.
        self._budget = Budget(config.sink_tokens, config.recent_tokens - 1, selected=0, page=1)
        self._scored: dict[int, _Scored] = {}
        self._beside: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._beside = torch.cuda.Stream(self._device)
            self._warm_up()

    def _warm_up(self) -> None:
        """Run what is measured with once, so that no step waits for it to compile."""
        config = self._config
        model, layers = config.model, config.groups[0]
        tokens = config.sink_tokens + config.recent_tokens + config.sparse_budget
        position = min(tokens, self._req_to_token.shape[1])
        queries = torch.zeros(
            (len(layers), model.query_heads, model.head_dim),
            dtype=model.torch_dtype,
            device=self._device,
        )
        scores = self._score(0, position, layers, queries).zero_()
        mirror = torch.zeros(
            (len(layers), model.kv_heads, config.sparse_budget),
            dtype=torch.int32,
            device=self._device,
        )
        measure_recall(scores, mirror, config, position)
        torch.cuda.synchronize(self._device)

    def score(
        self, step: int, sequence: SparseSequence, position: int, layers: range, queries: Tensor
    ) -> None:
        """Score a request's tokens before the current one, behind the forward pass of its step.

        Args:
            step: number of the step.
            sequence: the request.
            position: position of the token being computed.
            layers: the layers of the measured group.
            queries: (L, Hq, D), the true queries of the step, in the dtype of the pool.
        """
        if len(self._scored) == MOST_WAITING:
            del self._scored[next(iter(self._scored))]
        scores = self._score(sequence.row, position, layers, queries)
        done = torch.cuda.current_stream().record_event() if scores.is_cuda else None
        self._scored[step] = _Scored(sequence, position, layers, scores, done)

    def compare(self, measurement: Measurement) -> Readback | None:
        """Compare the slots of a measured step with its best tokens.

        Returns:
            (2, L, Hkv) float32 recall and attention mass, see `measure_recall`; or None where the
            step was not scored, its request has ended since, or the slots cannot be its.
        """
        scored = self._scored.pop(measurement.step, None)
        # Measurements come in the order of their steps: those of earlier ones will not come.
        for step in [step for step in self._scored if step < measurement.step]:
            del self._scored[step]
        if scored is None or scored.sequence.ended:
            return None
        slots = self._slots_of(measurement, scored)
        if slots is None:
            return None
        shares = Readback()
        with self._queueing_beside(scored):
            (mirror,) = upload((slots,), self._device)
            shares.start(measure_recall(scored.scores, mirror, self._config, scored.position))
        return shares

    def _score(self, row: int, position: int, layers: range, queries: Tensor) -> Tensor:
        model = self._config.model
        capacity = max(_FEWEST_SCORES, -(-position // _ROUNDING) * _ROUNDING)
        scores = torch.empty(
            (len(layers), model.kv_heads, capacity), dtype=torch.float32, device=self._device
        )
        group = model.query_heads // model.kv_heads
        workspace = self._kernels.score_workspace(1, model.kv_heads, group, capacity, self._device)
        rows, lengths = upload((torch.tensor([row]), torch.tensor([position])), self._device)
        for index, layer in enumerate(layers):
            self._kernels.score_tokens(
                queries[index : index + 1],
                self._keys[layer],
                self._req_to_token,
                rows,
                lengths,
                self._budget,
                model.scale,
                False,
                workspace,
                scores[index : index + 1],
            )
        return scores

    def _slots_of(self, measurement: Measurement, scored: _Scored) -> Tensor | None:
        """Return the tokens in the slots, (L, Hkv, k) int32, if all are tokens of the request."""
        heads = len(scored.layers) * self._config.model.kv_heads
        size = 4 * heads
        is_its = (measurement.epoch, measurement.first_layer) == (
            scored.sequence.epoch,
            scored.layers.start,
        )
        if not is_its or not measurement.slots or len(measurement.slots) % size:
            return None
        tokens = np.frombuffer(measurement.slots, dtype="<i4")
        if tokens.min() < 0 or tokens.max() >= scored.position:
            return None
        slots = torch.from_numpy(tokens.copy())
        return slots.view(len(scored.layers), self._config.model.kv_heads, -1)

    def _queueing_beside(self, scored: _Scored) -> AbstractContextManager[Any]:
        if self._beside is None or scored.done is None:
            return nullcontext()
        self._beside.wait_event(scored.done)
        scored.scores.record_stream(self._beside)
        return torch.cuda.stream(self._beside)
