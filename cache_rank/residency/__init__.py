"""How the cache rank holds K and V: one file a format, one interface.

A format is added by writing `cache_rank/residency/<name>.py` with a class of the interface below
and naming it in FORMATS; `--kv-residency` and the format tests pick it up from there.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cache_rank.config import ModelShape
from cache_rank.residency.bf16 import Bf16Residency


class Residency(Protocol):
    """The K and V of one sequence, all layers, tokens in order of position."""

    @property
    def tokens(self) -> int:
        """How many tokens are resident."""

    @property
    def bytes_held(self) -> int:
        """Memory in use, growth space included."""

    def append(self, layers: range, keys: Tensor, values: Tensor) -> None:
        """Append n tokens to some layers; every layer gets the same tokens before the next ones.

        Args:
            layers: which layers.
            keys, values: (len(layers), n, Hkv, D) in the dtype of the KV pool.
        """

    def score(self, layers: range, queries: Tensor, scale: float) -> Tensor:
        """Score all tokens resident in these layers: (len(layers), Hkv, T) float32.

        Args:
            layers: which layers.
            queries: (len(layers), Hq, D) float32.
            scale: factor on the logits.
        """

    def gather(self, layers: range, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Read tokens back: keys and values (len(layers), Hkv, n, D) in the pool's dtype.

        Args:
            layers: which layers.
            positions: (len(layers), Hkv, n) int64; negative entries give arbitrary tokens.
        """


FORMATS: dict[str, type[Bf16Residency]] = {"bf16": Bf16Residency}


def require_format(name: str) -> None:
    """Check that a format exists.

    Raises:
        ValueError: it does not.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown residency format {name!r}: use one of {', '.join(FORMATS)}")


def create(name: str, model: ModelShape, device: torch.device) -> Residency:
    """Start an empty residency.

    Raises:
        ValueError: unknown format.
    """
    require_format(name)
    return FORMATS[name](model, device)
