"""The memory that the messages of steps are staged and received in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import DownMessage, UpMessage


class GroupMessages(NamedTuple):
    """What a step sends and receives of one layer group."""

    up: UpMessage
    down: DownMessage


class MessageBuffers:
    """One staging and one receiving buffer a layer group, which stay where they are."""

    def __init__(
        self, config: CacheRankConfig, staging: Sequence[Tensor], answers: Sequence[Tensor]
    ) -> None:
        """Lay messages out over buffers.

        Args:
            config: agreed with the cache rank.
            staging, answers: (bytes,) uint8 of each group, for `config.max_rows` requests.
        """
        self._config = config
        self._staging, self._answers = staging, answers
        self._messages: dict[int, list[GroupMessages]] = {}

    def of(self, rows: int) -> list[GroupMessages]:
        """Return the messages of each group, in a step of so many requests."""
        if rows not in self._messages:
            self._messages[rows] = [self._of_group(group, rows) for group in range(self._groups)]
        return self._messages[rows]

    def nbytes(self, rows: int) -> tuple[int, int]:
        """Return the bytes that a step of so many requests sends, and receives."""
        messages = self.of(rows)
        return (
            sum(message.up.buffer.nbytes for message in messages),
            sum(message.down.buffer.nbytes for message in messages),
        )

    @property
    def _groups(self) -> int:
        return len(self._config.groups)

    def _of_group(self, group: int, rows: int) -> GroupMessages:
        config, layers = self._config, len(self._config.groups[group])
        up = self._staging[group][: UpMessage.size(config, layers, rows)]
        down = self._answers[group][: DownMessage.size(config, layers, rows)]
        return GroupMessages(
            UpMessage(config, layers, rows, up), DownMessage(config, layers, rows, down)
        )
