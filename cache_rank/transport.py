"""Point-to-point tensors between the two ranks, outside every process group of SGLang.

Three channels, each a two-rank group of its own so that none waits behind another: `up` carries
queries, keys and values, `down` the answers, `bulk` whole prompts. This file holds the gloo
channel, for ranks on CPUs; nccl.py holds the one for GPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Work  # type: ignore[attr-defined]

INFERENCE, CACHE = 0, 1
ABORT_SECONDS = 10.0


class TransportError(RuntimeError):
    """The peer died, closed the channel, or did not answer in time."""


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, timeout: float) -> None:
        """Make what follows wait for the transfer: the host, or on a GPU the current stream.

        Raises:
            TransportError: on a CPU, not done within `timeout` seconds, or never to be done.
        """


class Channel(Protocol):
    """Ordered transfers between the two ranks.

    On a GPU a transfer begins after the event `after`, or without one after all work queued on the
    current stream. CPU channels take no notice of it.
    """

    def send(self, tensor: Tensor, after: torch.cuda.Event | None = None) -> Pending: ...

    def receive(self, tensor: Tensor, after: torch.cuda.Event | None = None) -> Pending: ...

    def abort(self) -> None:
        """End transfers whose peer is gone, with arbitrary contents. Safe from any thread."""

    def close(self) -> None: ...


class Link:
    """The channels between an inference rank and its cache rank."""

    NAMES = ("up", "down", "bulk")

    def __init__(
        self,
        rendezvous: list[bytes],
        rank: int,
        device: torch.device,
        address: str,
        secret: bytes,
        timeout: float,
    ) -> None:
        """Connect all channels; both sides call this at about the same time.

        Args:
            rendezvous: of `make_rendezvous`.
            rank: INFERENCE or CACHE.
            device: where the tensors of this rank are.
            address: host name or IP of the interface that the channels bind to.
            secret: of this launch; each channel proves that both ends know it.
            timeout: seconds for the peer to appear.

        Raises:
            TransportError: the peer did not appear, or does not know the secret.
        """
        self._on_gpu = device.type == "cuda"
        channels: list[Any] = []
        for name, meeting in zip(self.NAMES, rendezvous, strict=True):
            if self._on_gpu:
                from cache_rank.nccl import NcclChannel

                channels.append(NcclChannel(name, meeting, rank, device, timeout))
            else:
                path = meeting.decode()
                channels.append(GlooChannel(path, name, rank, address, secret, timeout))
        self.up: Channel = channels[0]
        self.down: Channel = channels[1]
        self.bulk: Channel = channels[2]
        self._bulk_stream = channels[2].stream if self._on_gpu else None

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """On a GPU, work queued inside runs on the bulk channel's stream, beside the steps."""
        if self._bulk_stream is None:
            yield
        else:
            with torch.cuda.stream(self._bulk_stream):
                yield

    def abort(self) -> None:
        """End transfers whose peer is gone, with arbitrary contents. Safe from any thread."""
        # At once: a channel frees memory when it has ended, which waits for the others' transfers.
        threads = [
            threading.Thread(target=channel.abort, daemon=True)
            for channel in (self.up, self.down, self.bulk)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORT_SECONDS)

    def close(self) -> None:
        """Drop the channels, whose transfers have ended."""
        for channel in (self.up, self.down, self.bulk):
            channel.close()


def make_rendezvous(device: torch.device, folder: str) -> list[bytes]:
    """What both ranks need to connect a link; made by the inference rank.

    For CPUs a file a channel, in a folder that only this user can read; for GPUs a secret of NCCL,
    which travels on the authenticated control channel.
    """
    if device.type != "cuda":
        return [f"{folder}/{name}-{secrets.token_hex(4)}".encode() for name in Link.NAMES]
    from cache_rank.nccl import unique_id

    return [unique_id() for _ in Link.NAMES]


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

    def send(self, tensor: Tensor, after: torch.cuda.Event | None = None) -> Pending:
        try:
            return _GlooPending(self.name, tensor, self._group.send([tensor], self._peer, 0))
        except RuntimeError as error:
            raise TransportError(f"channel {self.name}: {error}") from error

    def receive(self, tensor: Tensor, after: torch.cuda.Event | None = None) -> Pending:
        try:
            return _GlooPending(self.name, tensor, self._group.recv([tensor], self._peer, 0))
        except RuntimeError as error:
            raise TransportError(f"channel {self.name}: {error}") from error

    def abort(self) -> None:
        """Nothing to do: gloo notices by itself that its peer is gone."""

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
