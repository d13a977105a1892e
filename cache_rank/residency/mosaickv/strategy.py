"""Strategies of `mosaickv`: how a segment is compressed (MosaicKV sections 4.3 and 5.5).

A strategy is of one layer and segment. The rotations are of each kv head, of keys and of values by
themselves; rate and element group are shared by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cache_rank.config import ModelShape, OptionValue
from cache_rank.kernels.mosaickv.vectors import (
    Strategy,
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


class Compression:
    """What options ask for: segments, the strategies to choose from, and the memory of any.

    Attributes:
        longest, shortest: most tokens of a segment, a multiple of 512, and fewest of one other than
            the opening.
        step: tokens between two looks at the loss of a segment, and between its end and the token
            from which its own strategy serves.
        originals: most tokens of a sequence that are held in full precision.
        threshold: the accumulated loss that ends a segment, in tokens that are lost altogether.
        channels: C, the number of channels that are left; a multiple of every group.
        kept: most elements of a vector.
        bitmap_bytes: most bytes of a bitmap, in whole words of 4.
        token_bytes: memory of a token, and its share of the strategies: the shortest segments have
            most.
        slot_bytes: memory of a slot: tokens in full precision, losses, strategies of the opening.
    """

    def __init__(self, options: Mapping[str, OptionValue], model: ModelShape) -> None:
        self.longest, self.threshold = int(options["segment"]), float(options["threshold"])
        self.shortest, self.step = self.longest // 4, self.longest // 8
        self.originals = self.longest + self.step
        rates, wanted = (
            chosen if options[name] == "auto" else (float(options[name]),)
            for name, chosen in _AUTO.items()
        )
        head_dim = model.head_dim
        self._dtype = model.torch_dtype
        groups = tuple(map(int, wanted))
        largest = groups[0]
        left = head_dim - int(head_dim * float(options["dropped"]) / 100)
        self.channels = -(-left // largest) * largest
        self._choices = [
            (self._elements(head_dim * (1 - rate / 100), group), group)
            for rate in rates
            for group in groups
        ]
        self.kept = max(kept for kept, _ in self._choices)
        self.bitmap_bytes = -(-bitmap_bytes(self.channels, groups[-1]) // 4) * 4
        self._largest_loss = float(options["loss"])
        heads, itemsize = 2 * model.layers * model.kv_heads, model.torch_dtype.itemsize
        strategy_bytes = heads * head_dim * self.channels * itemsize
        self.token_bytes = heads * (self.kept * itemsize + self.bitmap_bytes)
        self.token_bytes += -(-strategy_bytes // self.shortest)
        self.slot_bytes = self.originals * model.bytes_per_token + strategy_bytes
        self.slot_bytes += self.longest // BUFFER_TOKENS * heads * 8

    def most_strategies(self, tokens: int) -> int:
        """Most strategies of a sequence of so many tokens."""
        return tokens // self.shortest + 2

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
        last one loses least and is taken. Tokens are (2, Hkv, n, D), keys and values; `rotations`
        are those of their covariance.
        """
        sample = tokens[:, :, :: -(-tokens.shape[2] // _SAMPLE_TOKENS)]
        rotated = rotate(sample, rotations)
        for kept, group in self._choices:
            packed = pack_vectors(rotated, kept, group, tokens.dtype)
            if lost_energy(sample, packed).mean() <= self._largest_loss:
                break
        return Strategy(kept, group, rotations)


def find_strategies(
    tokens_of: Callable[[int], Tensor], layers: range, compression: Compression
) -> tuple[Tensor, Tensor]:
    """Find the strategy of each layer of a segment; of a layer it has tokens (2, Hkv, n, D).

    Returns:
        r and g, (layers, 2) int32 on the host, and rotations (layers, 2, Hkv, D, C).
    """
    # All layers are rotated at once: on a GPU, each by itself would take far longer.
    covariance = torch.stack([_covariance(tokens_of(layer)) for layer in layers])
    rotations = compression.rotations(covariance)
    chosen = [compression.choose(tokens_of(layer), rotations[layer])[:2] for layer in layers]
    return torch.tensor(chosen, dtype=torch.int32), rotations


def _covariance(tokens: Tensor) -> Tensor:
    """The sum of xᵀx, float64, of which squares of what float32 holds are in range."""
    parts = (part.double() for part in tokens.split(_SAMPLE_TOKENS, dim=2))
    return torch.stack([part.mT @ part for part in parts]).sum(dim=0)
