"""The memory that the messages of steps are staged and received in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import DownMessage, UpMessage


class StepMessages(NamedTuple):
    """What a step sends at each boundary, and what it receives for each layer group."""

    up: list[UpMessage]
    down: list[DownMessage]


class MessageBuffers:
    """A staging buffer for each boundary and a receiving one for each group, which never move."""

    def __init__(
        self, config: CacheRankConfig, staging: Sequence[Tensor], answers: Sequence[Tensor]
    ) -> None:
        """Lay messages out over buffers.

        Args:
            config: agreed with the cache rank.
            staging: (bytes,) uint8 of each boundary, for `config.max_rows` requests.
            answers: (bytes,) uint8 of each group, likewise.
        """
        self._config = config
        self._staging, self._answers = staging, answers
        self._messages: dict[int, StepMessages] = {}

    def of(self, rows: int) -> StepMessages:
        """Return the messages of a step of so many requests."""
        if rows not in self._messages:
            self._messages[rows] = self._make(rows)
        return self._messages[rows]

    def nbytes(self, rows: int) -> tuple[int, int]:
        """Return the bytes that a step of so many requests sends, and receives."""
        messages = self.of(rows)
        return (
            sum(message.buffer.nbytes for message in messages.up),
            sum(message.buffer.nbytes for message in messages.down),
        )

    def _make(self, rows: int) -> StepMessages:
        config, up, down = self._config, [], []
        for boundary, staging in zip(config.boundaries, self._staging, strict=True):
            size = UpMessage.size(config, boundary, rows)
            up.append(UpMessage(config, boundary, rows, staging[:size]))
        for layers, answer in zip(map(len, config.groups), self._answers, strict=True):
            size = DownMessage.size(config, layers, rows)
            down.append(DownMessage(config, layers, rows, answer[:size]))
        return StepMessages(up, down)
