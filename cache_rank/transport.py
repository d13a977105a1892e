"""Point-to-point tensors between the two ranks, outside every process group of SGLang.

Three channels, each a two-rank group of its own so that none waits behind another: `up` carries
queries, keys and values, `down` the answers, `bulk` whole prompts. This file holds the gloo
channel; a channel over another transport offers the same three methods.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Work  # type: ignore[attr-defined]

INFERENCE, CACHE = 0, 1


class TransportError(RuntimeError):
    """The peer died, closed the channel, or did not answer in time."""


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, timeout: float) -> None:
        """Return when the tensor may be used again.

        Raises:
            TransportError: not done within `timeout` seconds, or never to be done.
        """


class Channel(Protocol):
    """Ordered transfers between the two ranks."""

    def send(self, tensor: Tensor) -> Pending: ...

    def receive(self, tensor: Tensor) -> Pending: ...

    def close(self) -> None: ...


class Link:
    """The channels between an inference rank and its cache rank."""

    def __init__(
        self, rendezvous: str, rank: int, address: str, secret: bytes, timeout: float
    ) -> None:
        """Connect all channels; both sides call this at about the same time.

        Args:
            rendezvous: path of a file that only this user can read.
            rank: INFERENCE or CACHE.
            address: host name or IP of the interface that the channels bind to.
            secret: of this launch; each channel proves that both ends know it.
            timeout: seconds for the peer to appear.

        Raises:
            TransportError: the peer did not appear, or does not know the secret.
        """
        self.up: Channel = GlooChannel(rendezvous, "up", rank, address, secret, timeout)
        self.down: Channel = GlooChannel(rendezvous, "down", rank, address, secret, timeout)
        self.bulk: Channel = GlooChannel(rendezvous, "bulk", rank, address, secret, timeout)

    def close(self) -> None:
        for channel in (self.up, self.down, self.bulk):
            channel.close()


class GlooChannel:
    """A channel over TCP, for ranks that are CPU processes."""

    def __init__(
        self, rendezvous: str, name: str, rank: int, address: str, secret: bytes, timeout: float
    ) -> None:
        self.name = name
        self._peer = 1 - rank
        try:
            store = PrefixStore(name, FileStore(rendezvous, 2))
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout)
            self._group: Any = ProcessGroupGloo(store, rank, 2, options)
            self._authenticate(rank, secret, timeout)
        except RuntimeError as error:
            raise TransportError(f"channel {name}: {error}") from error

    def _authenticate(self, rank: int, secret: bytes, timeout: float) -> None:
        def proof(of_rank: int) -> Tensor:
            digest = hashlib.blake2b(f"{self.name}/{of_rank}".encode(), key=secret).digest()
            return torch.frombuffer(bytearray(digest), dtype=torch.uint8)

        received = torch.empty_like(proof(rank))
        sent = self.send(proof(rank))
        self.receive(received).wait(timeout)
        sent.wait(timeout)
        if not torch.equal(received, proof(self._peer)):
            raise TransportError(f"channel {self.name}: the peer does not know the secret")

    def send(self, tensor: Tensor) -> Pending:
        try:
            return _GlooPending(self.name, tensor, self._group.send([tensor], self._peer, 0))
        except RuntimeError as error:
            raise TransportError(f"channel {self.name}: {error}") from error

    def receive(self, tensor: Tensor) -> Pending:
        try:
            return _GlooPending(self.name, tensor, self._group.recv([tensor], self._peer, 0))
        except RuntimeError as error:
            raise TransportError(f"channel {self.name}: {error}") from error

    def close(self) -> None:
        del self._group


class _GlooPending:
    def __init__(self, name: str, tensor: Tensor, work: Work) -> None:
        self._name = name
        self._tensor = tensor  # gloo reads and writes it until the work is done
        self._work = work

    def wait(self, timeout: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise TransportError(f"channel {self._name}: {error}") from error
