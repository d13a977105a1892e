"""A step under way on the cache rank: its rows, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.protocol import Row
from cache_rank.resident_sequence import ResidentSequence
from cache_rank.schedule import LayerMessage


class RowNumbers(NamedTuple):
    """What is uploaded of each row of a step: its numbers, or a column of each.

    Attributes:
        slot: of the sequence; -1 in a refused row.
        queries: in the ring, the current one included.
        position: of the step.
        newest, newest_before: positions of the newest tokens held after the step, and before.
        budget, budget_before: how many slots it may fill then.
    """

    slot: Any
    queries: Any
    position: Any
    newest: Any
    newest_before: Any
    budget: Any
    budget_before: Any


REFUSED_ROW = RowNumbers(-1, 0, 0, 0, 0, 1, 1)


class SelectorStep(NamedTuple):
    """One step under way.

    Attributes:
        number: the step's number.
        rows: the rows on the device, at the positions of the step.
        after: the rows at the newest token that is held after a group's append, for answers for
            the next step. Drafts are not held: there it is the same as before.
        earlier: the rows at the newest token that is held before it, for answers for the step
            itself.
        key: two steps of the same key differ only in what their rows hold.
        live: index, row and sequence of each row that is exchanged.
        changed: (groups, R, 2) int32: tokens that entered, and that must wait for a later step.
    """

    number: int
    rows: BatchMetadata
    after: BatchMetadata
    earlier: BatchMetadata
    key: tuple[int, ...]
    live: Sequence[tuple[int, Row, ResidentSequence]]
    changed: Tensor

    def rows_of(self, layer_message: LayerMessage) -> BatchMetadata:
        """The rows by which the answer to a message is selected."""
        return self.earlier if layer_message.same_step else self.after
