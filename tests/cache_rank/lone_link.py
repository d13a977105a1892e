"""The cache rank's end of a link on a GPU, whose other end is the test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.cuda import Event

from cache_rank.channels.transport import queue_behind
from cache_rank.config import CacheRankConfig
from cache_rank.protocol import up_sizes


class LoneChannel:
    """A channel on which what is received is there already, or else is zeros.

    As with NCCL, transfers are queued on the channel's own stream.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.late_cycles = 0
        self._sent: list[Tensor] = []
        self._received = 0

    def put(self, tensor: Tensor) -> None:
        """As the peer sends; not in the middle of a test, because it waits for the device."""
        self._sent.append(tensor.to("cuda"))

    def send(
        self, tensor: Tensor, after: Event | None = None, buffer_index: int = 0
    ) -> LoneChannel:
        return self

    def receive(
        self, tensor: Tensor, after: Event | None = None, buffer_index: int = 0
    ) -> LoneChannel:
        queue_behind(after, self.stream)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self.late_cycles)
            if self._sent:
                tensor.copy_(self._sent[self._received])
            else:
                tensor.zero_()
        self._received += 1
        return self

    def wait(self, timeout: float) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


class LoneLink:
    """Three such channels."""

    def __init__(self, config: CacheRankConfig) -> None:
        self.up, self.down, self.bulk = LoneChannel(), LoneChannel(), LoneChannel()
        sizes = up_sizes(config, config.max_rows)
        self.buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]

    def in_background(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.bulk.stream)
