"""The requests that a step exchanges, and the slots that their answers are written into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.checksum.reference import slots_checksum
from cache_rank.kernels.scatter.reference import LayerBuffers, layer_buffers
from cache_rank.protocol import AnswerHeader
from sglang_ext.two_ranks.lifecycle import SparseSequence


class ExchangedRow(NamedTuple):
    """A request in the exchange of a step.

    Attributes:
        batch_index: its row of the batch.
        filled_after: slots in use once answers for the next step are applied.
        fresh_filled: slots in use once answers for this step are applied.
    """

    sequence: SparseSequence
    batch_index: int
    position: int
    filled_after: int
    fresh_filled: int

    def slots_filled(self, same_step: bool) -> int:
        """Slots in use once answers for this step, or for the next one, are applied."""
        return self.fresh_filled if same_step else self.filled_after

    def expected_header(self, step: int, same_step: bool) -> tuple[int, int, int, int]:
        """What the header of an answer must begin with."""
        resident, filled = self.position + (not same_step), self.slots_filled(same_step)
        return step, self.sequence.sequence_id, resident, filled


def by_batch_row(rows: Sequence[ExchangedRow], batch: int) -> list[int]:
    """Return the index among exchanged requests of each row of the batch, or -1."""
    indices = [-1] * batch
    for index, row in enumerate(rows):
        indices[row.batch_index] = index
    return indices


class SlotBuffers:
    """The pool's K and V buffers of the sparse layers, and where slots are in them.

    Attributes:
        keys, values: the buffers of all sparse layers.
        groups: keys and values of each layer group.
    """

    def __init__(
        self, config: CacheRankConfig, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        """Describe buffers, per layer (pool rows, Hkv, D)."""
        self.keys, self.values = layer_buffers(keys), layer_buffers(values)
        self.groups: list[tuple[LayerBuffers, LayerBuffers]] = [
            (
                layer_buffers(keys[layers.start : layers.stop]),
                layer_buffers(values[layers.start : layers.stop]),
            )
            for layers in config.groups
        ]
        self._sinks = config.sink_tokens

    @property
    def device(self) -> torch.device:
        return self.keys.tensors[0].device

    def first_slot(self, sequence: SparseSequence) -> int:
        """Return the pool row of a sequence's slot 0."""
        return sequence.block + self._sinks

    def compare_checksums(
        self, group: int, rows: Sequence[ExchangedRow], headers: Tensor, same_step: bool
    ) -> None:
        """Compare the slots in use with those of the cache rank's slot map; stops the device.

        Raises:
            AssertionError: they differ.
        """
        for row, columns in zip(rows, headers.tolist(), strict=True):
            if row.sequence.ended:
                continue
            first = self.first_slot(row.sequence)
            used = slice(first, first + row.slots_filled(same_step))
            keys, values = (
                torch.stack([tensor[used].transpose(0, 1) for tensor in part.tensors])
                for part in self.groups[group]
            )
            if slots_checksum(keys, values) != AnswerHeader(*columns).checksum:
                name = f"sequence {row.sequence.sequence_id} at {row.position}"
                raise AssertionError(f"slots of {name} differ from the slot map")
