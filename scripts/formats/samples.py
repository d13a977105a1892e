"""What residency formats are compared on, and how to read it from a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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

    def to(self, device: torch.device) -> Sample:
        """The same on a device."""
        keys, values, queries = (part.to(device) for part in self[:3])
        return Sample(keys, values, queries, self.scale, self.source)


def read_recording(folder: Path, steps: int) -> Sample:
    """The longest sequence that a cache rank recorded, see cache_rank/recording.py.

    Recordings do not hold the factor on attention logits; it is taken to be D ** -0.5.

    Args:
        folder: the one that CACHE_RANK_RECORD named.
        steps: newest tokens whose queries are wanted; fewer if it has fewer.

    Raises:
        ValueError: there is no recording, or none of a decode step.
    """
    loads: dict[int, list[Tensor]] = {}
    decoded: dict[int, dict[int, list[dict[str, Any]]]] = {}  # by epoch and position
    for event in read_events(folder):
        if event["kind"] == "load":
            loads.setdefault(event["epoch"], []).append(event["shipment"])
            continue
        for row in event["rows"]:
            at_position = decoded.setdefault(row["epoch"], {}).setdefault(row["position"], [])
            at_position.append({**row, "first_layer": event["layers"].start})
    if not decoded:
        raise ValueError(f"{folder}: holds no recorded decode step")
    sequences = [
        _sequence(torch.cat(loads[epoch], dim=2), positions)
        for epoch, positions in decoded.items()
        if epoch in loads
    ]
    if not sequences:
        raise ValueError(f"{folder}: the bulk shipments of its decode steps are missing")
    keys, values, queries = max(sequences, key=lambda parts: parts[0].shape[2])
    if not len(queries):
        raise ValueError(f"{folder}: holds no decode step of every layer")
    source = f"recording: {keys.shape[0]} layers, {keys.shape[2]} tokens"
    return Sample(keys, values, queries[-steps:], keys.shape[-1] ** -0.5, source)


def _sequence(
    shipped: Tensor, positions: dict[int, list[dict[str, Any]]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries, as in Sample, up to the last step that has every layer."""
    layers = shipped.shape[1]
    keys, values = ([part.transpose(1, 2)] for part in shipped)
    queries = [shipped.new_empty((0, layers, *positions[min(positions)][0]["queries"].shape[1:]))]
    position = shipped.shape[2]
    while sum(len(part["keys"]) for part in positions.get(position, [])) == layers:
        parts = sorted(positions[position], key=lambda part: part["first_layer"])
        for of_sequence, name, dim in ((keys, "keys", 2), (values, "values", 2)):
            of_sequence.append(torch.cat([part[name] for part in parts]).unsqueeze(dim))
        queries.append(torch.cat([part["queries"] for part in parts]).unsqueeze(0))
        position += 1
    return torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat(queries)
