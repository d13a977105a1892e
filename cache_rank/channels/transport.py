"""A channel between the two ranks: point-to-point tensors, outside SGLang's process groups.

gloo.py holds the channel for ranks on CPUs, nccl.py and peer.py those for GPUs, link.py the three
that a pair of ranks has.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

INFERENCE, CACHE = 0, 1


class TransportError(RuntimeError):
    """The peer died, closed the channel, or did not answer in time."""


class Pending(Protocol):
    """A transfer under way, which keeps its tensor."""

    def is_done(self) -> bool:
        """Whether it is known to be over, without waiting for it."""

    def wait(self, timeout: float) -> None:
        """Make what follows wait for the transfer: the host, or on a GPU the current stream.

        Raises:
            TransportError: on a CPU, it was not done within `timeout` seconds, or never will be.
        """


class Channel(Protocol):
    """Ordered transfers between the two ranks.

    On a GPU a transfer begins after the event `after`, or without one after all work queued on the
    current stream. CPU channels take no notice of it. `buffer_index` says which of the
    receiver's buffers a message is for, on both sides alike; only channels that write into them
    themselves take notice.
    """

    def send(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, buffer_index: int = 0
    ) -> Pending: ...

    def receive(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, buffer_index: int = 0
    ) -> Pending: ...

    def abort(self) -> None:
        """End transfers whose peer is gone, with arbitrary contents. Safe from any thread."""

    def close(self) -> None: ...


def queue_behind(after: torch.cuda.Event | None, stream: torch.cuda.Stream) -> None:
    """Let what is queued next on a channel's stream wait as its transfers do, see `Channel`."""
    if after is None:
        stream.wait_stream(torch.cuda.current_stream())
    else:
        stream.wait_event(after)


class StreamPending:
    """A transfer that has just been queued on a stream."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self._tensor = tensor  # is read or written until the transfer is done
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def is_done(self) -> bool:
        return self._done.query()

    def wait(self, timeout: float) -> None:
        torch.cuda.current_stream().wait_event(self._done)
