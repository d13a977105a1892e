"""How good a selection was, and how alike queries are: measured when a step's true query arrives.

A measured step takes one layer group of one request. It compares, for each layer and head,

    recall              the tokens in the slots with the top k by the true query
    attention mass      the attention probability that the slots held
    query cosine        the prediction, made a step ago, with the true query
    prediction overlap  the top k by both of these (AsyncSpade Fig. 5, with the shift)
    overlap             the top k by the true query and by an earlier one (Eq. 1, Fig. 4)

The tokens that compete are those of the measured step every time, and k is the slots in use.

`measure_recall` takes scores by whichever keys there are. The cache rank has them as its residency
format holds them: the recall that it measures is called held, and says nothing of what the format
costs. The inference rank may have them as they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.copies import Readback
from cache_rank.kernels.select.reference import top_tokens
from cache_rank.protocol import Measurement


def overlap_distances(window: int) -> tuple[int, ...]:
    """How many steps before a measured step its query is compared with others: 1, 2, 4, ...

    Args:
        window: W; as many queries are held at least, and the largest distance is at most W.
    """
    return tuple(1 << power for power in range(window.bit_length()))


def overlap_ratio(first: Tensor, second: Tensor, tokens: int) -> Tensor:
    """Share of tokens that two selections have in common (AsyncSpade Eq. 1).

    Args:
        first, second: (..., k) integer positions within [0, tokens), each at most once.
        tokens: number of resident tokens.

    Returns:
        (...) float32.
    """
    chosen = torch.zeros((*first.shape[:-1], tokens), dtype=torch.bool, device=first.device)
    chosen.scatter_(-1, first.to(torch.int64), True)
    return chosen.gather(-1, second.to(torch.int64)).float().mean(-1)


def measure_recall(
    scores: Tensor, mirror: Tensor, config: CacheRankConfig, position: int
) -> Tensor:
    """Compare the slots that a step used with exact selection by the true query of that step.

    Args:
        scores: (L, Hkv, >= position) float32 by the true queries of the step at `position`.
        mirror: (L, Hkv, filled) integer, the tokens that sat in slots, chosen after `position - 1`.
        config: the cache rank's policy.
        position: the step's position.

    Returns:
        (2, L, Hkv) float32: the share of the exact top tokens that sat in slots, and the share of
        attention probability (the largest of each head group) outside sinks and recent tokens that
        the slots held; NaN when no slot is in use.
    """
    candidates = config.candidates_after(position - 1)
    exact = top_tokens(scores[..., :position], candidates, mirror.shape[-1])
    return torch.stack(
        (overlap_ratio(mirror, exact, position), _attention_mass(scores, mirror, candidates))
    )


def _attention_mass(scores: Tensor, mirror: Tensor, candidates: range) -> Tensor:
    """The share of the candidates' attention probability that slots held, (L, Hkv)."""
    probability = scores[..., : candidates.stop].exp()
    held = probability.gather(-1, mirror.to(torch.int64)).sum(-1)
    mass = held / probability[..., candidates.start :].sum(-1).clamp(min=1e-30)
    return mass if mirror.shape[-1] else torch.full_like(mass, float("nan"))


class MeasuredStep(NamedTuple):
    """What is measured.

    Attributes:
        epoch: the request's epoch.
        number: number of the step.
        position: position of the token being computed.
        layers: the layers of the group.
        wants_slots: whether the measurement says which tokens sat in the slots.
    """

    epoch: int
    number: int
    position: int
    layers: range
    wants_slots: bool


class _Waiting(NamedTuple):
    """A measurement on its way to the host.

    Attributes:
        step: what was measured.
        values: (L, columns), see `RecallMeter.measure`.
        slots: (L, Hkv, k) int32 where they are wanted; they are copied after the values.
    """

    step: MeasuredStep
    values: Readback
    slots: Readback | None

    @property
    def is_ready(self) -> bool:
        return (self.slots or self.values).value() is not None


class RecallMeter:
    """Measures steps, and keeps the results until they are on the host and taken."""

    def __init__(self, config: CacheRankConfig) -> None:
        self._config = config
        self._distances = overlap_distances(config.query_window)
        self._waiting: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """How many measurements were not taken yet."""
        return len(self._waiting)

    def measure(
        self,
        step: MeasuredStep,
        mirror: Tensor,
        queries: Tensor,
        predicted: Tensor,
        query_ring: Tensor,
        score: Callable[[Tensor], Tensor],
    ) -> None:
        """Measure one request's step, before its token is appended.

        Nothing waits for the device.

        Args:
            step: what is measured.
            mirror: (L, Hkv, k) integer, the tokens in the slots that the step uses; k at least 1.
            queries: (L, Hq, D), the true queries.
            predicted: (L, Hq, D) float32, the predictions of these queries.
            query_ring: (L, Hq, W + 1, D), the true queries of the steps before; that of position p
                is entry p % (W + 1).
            score: exact scores (L, Hkv, >= position) float32 of the resident tokens by given
                queries, valid until its next call.
        """
        position = step.position
        candidates = self._config.candidates_after(position - 1)
        slots = mirror.shape[-1]
        queries = queries.float()
        scores = score(queries)
        exact = top_tokens(scores[..., :position], candidates, slots)
        columns = [
            overlap_ratio(mirror, exact, position),
            _attention_mass(scores, mirror, candidates),
        ]
        entries = [(position - distance) % query_ring.shape[2] for distance in self._distances]
        for other in (predicted, *(query_ring[:, :, entry].float() for entry in entries)):
            chosen = top_tokens(score(other)[..., :position], candidates, slots)
            columns.append(overlap_ratio(exact, chosen, position))
        columns.append(torch.nn.functional.cosine_similarity(queries, predicted, dim=-1))
        values = Readback()
        values.start(torch.cat(columns, dim=-1))
        tokens = Readback() if step.wants_slots else None
        if tokens is not None:
            tokens.start(mirror.to(torch.int32).contiguous())
        self._waiting.append(_Waiting(step, values, tokens))

    def take(self) -> list[Measurement]:
        """Take the measurements that are on the host, oldest first."""
        taken = []
        while self._waiting and self._waiting[0].is_ready:
            taken.append(self._measurement(self._waiting.popleft()))
        return taken

    def _measurement(self, waiting: _Waiting) -> Measurement:
        step, values, slots = waiting.step, waiting.values.value(), None
        assert values is not None
        if waiting.slots is not None:
            slots = waiting.slots.value()
        kv_heads, distances = self._config.model.kv_heads, len(self._distances)
        by_kv_head = values[:, : (3 + distances) * kv_heads].unflatten(-1, (-1, kv_heads))
        recall, mass, prediction, *overlap = by_kv_head.transpose(0, 1).tolist()
        return Measurement(
            step.epoch,
            step.number,
            step.layers.start,
            recall,
            mass,
            query_cosine=values[:, (3 + distances) * kv_heads :].tolist(),
            prediction_overlap=prediction,
            overlap=overlap,
            slots=b"" if slots is None else slots.numpy().tobytes(),
        )
