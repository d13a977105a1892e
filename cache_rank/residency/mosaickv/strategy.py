"""Strategies of `mosaickv`: how a segment is compressed (MosaicKV sections 4.3 and 5.5).

A strategy is of one layer and segment. The rotations are of each kv head, of keys and of values by
themselves; rate and element group are shared by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from cache_rank.config import ModelShape, OptionValue
from cache_rank.kernels.mosaickv.store import Strategy
from cache_rank.kernels.mosaickv.vectors import (
    PackedVectors,
    bitmap_bytes,
    lost_energy,
    pack_vectors,
    rotate,
    rotation_of,
)

_AUTO: Mapping[str, tuple[float, ...]] = {
    "rate": (87.5, 75, 62.5),
    "group": (4, 2, 1),
}
"""`auto` chooses from these; what compresses most comes first."""

BUFFER_TOKENS = 32
"""The newest tokens wait in full precision until there are so many (section 5.3)."""

_SAMPLE_TOKENS = 1024
"""Rate and element group are chosen by so many tokens of a segment, evenly spaced."""


class SegmentLengths(NamedTuple):
    """Where a segment is finished, and when its own strategy takes effect.

    Attributes:
        most: most tokens of a segment, a multiple of 512.
        threshold: the accumulated loss that ends a segment, in tokens that are lost altogether.
    """

    most: int
    threshold: float

    @classmethod
    def of(cls, options: Mapping[str, OptionValue]) -> SegmentLengths:
        """The lengths that the options `segment` and `threshold` ask for."""
        return cls(int(options["segment"]), float(options["threshold"]))

    @property
    def least(self) -> int:
        """Fewest tokens of a segment other than the opening."""
        return self.most // 4

    @property
    def delay(self) -> int:
        """Tokens between the end of a segment and the step from which its own strategy serves."""
        return self.most // 8

    def most_strategies(self, tokens: int) -> int:
        """Most strategies of a sequence of so many tokens."""
        return tokens // self.least + 2

    @property
    def originals(self) -> int:
        """Most tokens of a sequence that are held in full precision."""
        return self.most + self.delay


class Candidates:
    """The strategies that there are to choose from, and the memory that any of them may need.

    Attributes:
        channels: C, the number of channels that are left; a multiple of every group.
        kept: most elements of a vector.
        bitmap_bytes: most bytes of a bitmap, in whole words of 4.
        token_bytes: memory of a token's key and value, all layers.
        strategy_bytes: memory of one segment's strategies, all layers.
    """

    def __init__(self, options: Mapping[str, OptionValue], model: ModelShape) -> None:
        rates, groups = (_candidates(options, name) for name in ("rate", "group"))
        head_dim = model.head_dim
        self._dtype = model.torch_dtype
        self._groups = tuple(int(group) for group in groups if head_dim % group == 0)
        if not self._groups:
            raise ValueError(
                f"kv_residency_options group={options['group']}: does not divide the head "
                f"dimension {head_dim}"
            )
        largest = self._groups[0]
        left = head_dim - int(head_dim * float(options["dropped"]) / 100)
        self.channels = -(-left // largest) * largest
        self._choices = [
            (self._elements(head_dim * (1 - rate / 100), group), group)
            for rate in rates
            for group in self._groups
        ]
        self.kept = max(kept for kept, _ in self._choices)
        self.bitmap_bytes = -(-bitmap_bytes(self.channels, self._groups[-1]) // 4) * 4
        self._largest_loss = float(options["loss"])
        heads, itemsize = 2 * model.layers * model.kv_heads, model.torch_dtype.itemsize
        self.token_bytes = heads * (self.kept * itemsize + self.bitmap_bytes)
        self.strategy_bytes = heads * head_dim * self.channels * itemsize

    def _elements(self, wanted: float, group: int) -> int:
        """The largest number of elements up to `wanted` that is whole groups; at least one."""
        return min(self.channels, max(1, int(wanted) // group) * group)

    def rotations(self, covariance: Tensor) -> Tensor:
        """Rotations of covariances (..., D, D): (..., D, C) in the dtype of the pool."""
        return rotation_of(covariance, self.channels).to(self._dtype)

    def choose(self, tokens: Tensor, rotations: Tensor) -> Strategy:
        """Choose the strategy of a finished segment of one layer.

        The paper wants the highest rate and the largest group whose loss is below a threshold, and
        does not say which of the two goes first: here the rate does. Where none is below it, the
        last one loses least and is taken.

        Args:
            tokens: (2, Hkv, n, D), keys and values.
            rotations: (2, Hkv, D, C), rotations of their covariance.
        """
        sample = tokens[:, :, :: -(-tokens.shape[2] // _SAMPLE_TOKENS)]
        rotated = rotate(sample, rotations)
        for kept, group in self._choices:
            packed = pack_vectors(rotated, kept, group, tokens.dtype)
            if lost_energy(sample, packed).mean() <= self._largest_loss:
                break
        return Strategy(kept, group, rotations)


def recompress(
    tokens_of: Callable[[int], Tensor], covariance: Tensor, candidates: Candidates
) -> list[tuple[Strategy, PackedVectors]]:
    """Choose the strategies of a finished segment, and compress it by them.

    Args:
        tokens_of: given a layer, returns all tokens of the segment, (2, Hkv, n, D).
        covariance: (layers, 2, Hkv, D, D) float64, of its keys and values.
        candidates: the strategies to choose from.

    Returns:
        Of each layer, its strategy and the tokens that it has compressed.
    """
    found = []
    # All layers are rotated at once: on a GPU, each by itself would take far longer.
    for layer, rotations in enumerate(candidates.rotations(covariance)):
        tokens = tokens_of(layer)
        strategy = candidates.choose(tokens, rotations)
        found.append((strategy, strategy.compress(tokens)))
    return found


def _candidates(options: Mapping[str, OptionValue], name: str) -> tuple[float, ...]:
    value = options[name]
    return _AUTO[name] if isinstance(value, str) else (value,)
