"""The memory that the messages of steps are in, on either rank.

A message is laid out over its buffer once for each number of rows: a dozen views a message, of
dozens of messages, would take either host more than a millisecond of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import DownMessage, UpMessage
from cache_rank.schedule import LayerMessage


class StepMessages(NamedTuple):
    """What travels to the cache rank in each message, and back for each layer group."""

    up: list[UpMessage]
    down: list[DownMessage]

    def answer_of(self, layer_message: LayerMessage) -> DownMessage | None:
        """What answers a message, if anything does."""
        return None if layer_message.selects_for is None else self.down[layer_message.selects_for]


class MessageBuffers:
    """A buffer for each message and one for each group, which never move."""

    def __init__(
        self, config: CacheRankConfig, ups: Sequence[Tensor], answers: Sequence[Tensor]
    ) -> None:
        """Lay messages out over memory, (bytes,) uint8 of each message and of each answer."""
        self._config = config
        self._ups, self._answers = ups, answers
        self._messages: dict[int, StepMessages] = {}

    def of(self, rows: int) -> StepMessages:
        if rows not in self._messages:
            config = self._config
            ups = zip(config.layer_messages, self._ups, strict=True)
            answers = zip(config.groups, self._answers, strict=True)
            self._messages[rows] = StepMessages(
                [UpMessage(config, layer_message, rows, memory) for layer_message, memory in ups],
                [DownMessage(config, len(layers), rows, memory) for layers, memory in answers],
            )
        return self._messages[rows]

    def nbytes(self, rows: int) -> tuple[int, int]:
        """Return the bytes of a step of so many requests, to the cache rank and back."""
        messages = self.of(rows)
        return (
            sum(message.buffer.nbytes for message in messages.up),
            sum(message.buffer.nbytes for message in messages.down),
        )
