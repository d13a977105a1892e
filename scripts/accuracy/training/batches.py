"""What a training step reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

SAMPLED = 0.05
"""Weight of a token that nothing determines, where the model must learn to sample it."""


class Batch(NamedTuple):
    """Sequences of one shape, [sequences, length] each, on the device that trains.

    Attributes:
        tokens: what the model reads, int64.
        labels: the token after each of them, int64.
        weights: of each label in the loss, float32; 0 where nothing determines it.
        hops: labels whose accuracy says how far training is, bool: those that take a look-up,
            and no restatement.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    hops: torch.Tensor


class Stage(Protocol):
    """One shape of training sequences."""

    @property
    def length(self) -> int:
        """Tokens of its longest sequence that the model reads."""
        ...

    def batches(
        self, vocabulary: Mapping[str, int], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        """Batches without end, a function of the seed and the device."""
        ...
