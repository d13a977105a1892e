"""What residency formats are compared on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.shared.recordings import read_recording


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


def recorded_sample(folder: Path, steps: int) -> Sample:
    """The longest sequence that a cache rank recorded.

    Args:
        folder: the one that CACHE_RANK_RECORD named.
        steps: newest tokens whose queries are wanted; fewer if it has fewer.

    Raises:
        ValueError: there is no recording, or none of a decode step.
    """
    config, sequences = read_recording(folder)
    keys, values, queries = max(sequences, key=lambda recorded: recorded.keys.shape[2])
    return Sample(keys, values, queries[-steps:], config.model.scale, "recording")
