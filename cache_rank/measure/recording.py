"""Records what the cache rank received and chose, for comparison with the synchronous reference.

Set CACHE_RANK_RECORD to a folder to record; every event becomes one numbered file there, which
`scripts/shared/recordings.py` reads back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import UpMessage
from cache_rank.schedule import LayerMessage
from cache_rank.selector import Selector
from cache_rank.selector_step import SelectorStep

RECORD_VARIABLE = "CACHE_RANK_RECORD"


class Recorder:
    """Writes events to the folder that the environment names, or does nothing without one."""

    def __init__(self, config: CacheRankConfig) -> None:
        folder = os.environ.get(RECORD_VARIABLE)
        self._folder = Path(folder) if folder else None
        self._events = 0
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.write("config", config=msgspec.to_builtins(config))

    def write_step(
        self, selector: Selector, step: SelectorStep, layer_message: LayerMessage, up: UpMessage
    ) -> None:
        """Record one message of a step.

        `layers` are those whose queries, keys and values came, `answered` those that were selected
        for, `same_step` says whether for this step, and `slot_map` is of these, after it.
        """
        if self._folder is None:
            return
        groups = selector.config.groups
        kv_of, selects_for = layer_message.kv_of, layer_message.selects_for
        answered = range(0) if selects_for is None else groups[selects_for]
        came = UpMessage(selector.config, layer_message, len(up.hidden), up.buffer.cpu())
        rows = [
            {
                "sequence_id": row.sequence_id,
                "position": row.position,
                "queries": came.queries[index].clone(),
                "keys": came.keys[index].clone(),
                "values": came.values[index].clone(),
                "hidden": came.hidden[index].clone(),
                "slot_map": selector.slot_map(sequence, answered).cpu().clone(),
            }
            for index, row, sequence in step.live
        ]
        self.write(
            "step",
            step=step.number,
            layers=range(0) if kv_of is None else groups[kv_of],
            answered=answered,
            same_step=layer_message.same_step,
            rows=rows,
        )

    def write(self, kind: str, **content: Any) -> None:
        """Record an event of what the cache rank was sent; tensors go to the CPU."""
        if self._folder is None:
            return
        for name, part in content.items():
            content[name] = part.cpu().contiguous() if isinstance(part, Tensor) else part
        self._events += 1
        temporary = self._folder / f"{self._events:08d}.writing"
        torch.save({"kind": kind, **content}, temporary)
        temporary.rename(self._folder / f"{self._events:08d}.pt")
