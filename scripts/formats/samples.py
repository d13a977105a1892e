"""What residency formats are compared on, and how to read it from a recording."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.measure.recording import read_events


class Sample(NamedTuple):
    """Keys and values of one sequence, and the true queries of its newest tokens.

    Attributes:
        keys, values: (layers, Hkv, tokens, D) in the dtype of a KV pool.
        queries: (steps, layers, Hq, D) of the same dtype, those of the newest `steps` tokens.
        scale: factor on attention logits.
        source: what it is, in a phrase.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    scale: float
    source: str

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def steps(self) -> int:
        return self.queries.shape[0]

    @property
    def positions(self) -> range:
        """The positions of the tokens whose queries there are."""
        return range(self.tokens - self.steps, self.tokens)

    def describe(self) -> str:
        """The source and the shape, in a phrase."""
        layers, kv_heads, tokens, head_dim = self.keys.shape
        dtype = str(self.keys.dtype).removeprefix("torch.")
        shape = f"{layers} layers, {kv_heads} KV heads of {head_dim}, {tokens} tokens, {dtype}"
        return f"{self.source}: {shape}"

    def to(self, device: torch.device) -> Sample:
        """The same on a device."""
        keys, values, queries = (part.to(device) for part in self[:3])
        return Sample(keys, values, queries, self.scale, self.source)


def read_recording(folder: Path, steps: int) -> Sample:
    """The longest sequence that a cache rank recorded, see cache_rank/measure/recording.py.

    Args:
        folder: the one that CACHE_RANK_RECORD named.
        steps: newest tokens whose queries are wanted; fewer if it has fewer.

    Raises:
        ValueError: there is no recording, or none of a decode step.
    """
    loads: dict[int, list[Tensor]] = defaultdict(list)
    # By epoch and position; an event holds the rows of one layer group, if any.
    decoded: dict[int, dict[int, list[_Part]]] = defaultdict(lambda: defaultdict(list))
    scale = math.nan
    for event in read_events(folder):
        if event["kind"] == "config":
            scale = event["config"].model.scale
        if event["kind"] == "load":
            loads[event["epoch"]].append(event["shipment"])
        for row in event.get("rows", ()):
            part = _Part(event["layers"].start, row["queries"], row["keys"], row["values"])
            decoded[row["epoch"]][row["position"]].append(part)
    sequences = [_sequence(loads[epoch], decoded[epoch]) for epoch in loads.keys() & decoded.keys()]
    whole = [tensors for tensors in sequences if tensors]
    if not whole:
        raise ValueError(f"{folder}: holds no recorded decode step of every layer of a sequence")
    keys, values, queries = max(whole, key=lambda tensors: tensors[0].shape[2])
    return Sample(keys, values, queries[-steps:], scale, "recording")


class _Part(NamedTuple):
    """One token in the layers of one group."""

    first_layer: int
    queries: Tensor  # (layers, Hq, D)
    keys: Tensor  # (layers, Hkv, D)
    values: Tensor  # (layers, Hkv, D)


def _sequence(
    shipments: list[Tensor], positions: Mapping[int, list[_Part]]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys, values and queries, as in Sample, up to the last step that has every layer, if any."""
    shipped = torch.cat(shipments, dim=2)
    _, layers, prompt, *_ = shipped.shape
    queries, tokens = [], []
    for position in itertools.count(prompt):
        parts = sorted(positions.get(position, []), key=lambda part: part.first_layer)
        if sum(len(part.keys) for part in parts) != layers:
            break
        queries.append(torch.cat([part.queries for part in parts]))
        tokens.append(torch.cat([torch.stack((part.keys, part.values)) for part in parts], dim=1))
    if not queries:
        return None
    # (2, layers, Hkv, tokens, D)
    keys, values = torch.cat((shipped.transpose(2, 3), torch.stack(tokens, dim=3)), dim=3)
    return keys, values, torch.stack(queries)
