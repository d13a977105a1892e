"""Reads what a cache rank recorded as sequences, see cache_rank/measure/recording.py."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from scripts.shared.command import UsageError

_Row = dict[str, Any]
"""One token in the layers of a group: `queries`, (layers, Hq, D), `keys`, `values` and more."""


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Read what a cache rank wrote, in order, to the CPU. No code of the files is run.

    The first event holds the `config` by which all others were. UsageError if a file is no event.
    """
    for path in sorted(folder.glob("*.pt")):
        try:
            with torch.serialization.safe_globals([range]):
                event = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
            raise UsageError(f"{path}: not an event of a recording ({error})") from None
        if not isinstance(event, dict) or "kind" not in event:
            raise UsageError(f"{path}: not an event of a recording")
        if event["kind"] == "config":
            event["config"] = msgspec.convert(event["config"], CacheRankConfig)
        yield event


class Recorded(NamedTuple):
    """Keys and values of one sequence, and the true queries of its newest tokens.

    Attributes:
        keys, values: (layers, Hkv, tokens, D) in the dtype of a KV pool.
        queries: (steps, layers, Hq, D) of the same dtype.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def prompt(self) -> int:
        """Tokens before the first query."""
        return self.tokens - len(self.queries)

    @property
    def positions(self) -> range:
        """The positions of the tokens whose queries there are."""
        return range(self.prompt, self.tokens)

    def shipment(self) -> Tensor:
        """Keys and values of the prompt as they are shipped: (2, layers, prompt, Hkv, D)."""
        kv = torch.stack((self.keys, self.values))[..., : self.prompt, :]
        return kv.transpose(2, 3).contiguous()


def read_recording(folder: Path) -> tuple[CacheRankConfig, list[Recorded]]:
    """The configuration of a recording, and its sequences, up to the last step with every layer.

    UsageError if there is none of a decode step.
    """
    config: CacheRankConfig | None = None
    loads: dict[int, list[Tensor]] = defaultdict(list)
    # By sequence id, position and first layer; an event holds rows of one layer group, if any.
    decoded: dict[int, dict[int, dict[int, _Row]]] = defaultdict(lambda: defaultdict(dict))
    for event in read_events(folder):
        if event["kind"] == "config":
            config = event["config"]
        if event["kind"] == "load":
            loads[event["sequence_id"]].append(event["shipment"])
        for row in event.get("rows", ()):
            decoded[row["sequence_id"]][row["position"]][event["layers"].start] = row
    sequences = [
        _sequence(shipments, decoded[sequence_id]) for sequence_id, shipments in loads.items()
    ]
    whole = [sequence for sequence in sequences if sequence]
    if config is None or not whole:
        raise UsageError(f"{folder}: holds no recorded decode step of every layer of a sequence")
    return config, whole


def _sequence(
    shipments: Sequence[Tensor], positions: Mapping[int, Mapping[int, _Row]]
) -> Recorded | None:
    shipped = torch.cat(list(shipments), dim=2)
    _, layers, prompt, *_ = shipped.shape
    queries, tokens = [], []
    for position in itertools.count(prompt):
        rows = [row for _, row in sorted(positions.get(position, {}).items())]
        if sum(len(row["keys"]) for row in rows) != layers:
            break
        queries.append(torch.cat([row["queries"] for row in rows]))
        tokens.append(torch.cat([torch.stack((row["keys"], row["values"])) for row in rows], dim=1))
    if not queries:
        return None
    # (2, layers, Hkv, tokens, D)
    keys, values = torch.cat((shipped.transpose(2, 3), torch.stack(tokens, dim=3)), dim=3)
    return Recorded(keys, values, torch.stack(queries))
