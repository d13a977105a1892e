"""What a training step reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

SAMPLED = 0.05
"""A token that nothing determines has this weight where the model must learn to sample it."""


class Batch(NamedTuple):
    """Sequences of one shape, [sequences, length] each, on the device that trains.

    The accuracy of hops says how far training is: they take a look-up and are no restatement.
    """

    tokens: torch.Tensor  # what the model reads, int64
    labels: torch.Tensor  # the token after each of them, int64
    weights: torch.Tensor  # weights in the loss, float32; 0 where nothing determines it
    hops: torch.Tensor  # labels that are hops, bool


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
