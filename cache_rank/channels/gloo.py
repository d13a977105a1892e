"""Point-to-point channels over gloo, between two processes on the CPUs of one machine."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Work  # type: ignore[attr-defined]

from cache_rank.channels.transport import Pending, TransportError


@contextlib.contextmanager
def _transport_errors(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"channel {name}: {error}") from error


class GlooChannel:
    """A channel over TCP, for ranks that are CPU processes."""

    def __init__(
        self, rendezvous: str, name: str, rank: int, address: str, secret: bytes, timeout: float
    ) -> None:
        self.name = name
        self._peer = 1 - rank
        with _transport_errors(name):
            store = PrefixStore(name, FileStore(rendezvous, 2))
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout)
            self._group: Any = ProcessGroupGloo(store, rank, 2, options)
        self._authenticate(rank, secret, timeout)

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

    def send(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, buffer_index: int = 0
    ) -> Pending:
        with _transport_errors(self.name):
            return _GlooPending(self.name, tensor, self._group.send([tensor], self._peer, 0))

    def receive(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, buffer_index: int = 0
    ) -> Pending:
        with _transport_errors(self.name):
            return _GlooPending(self.name, tensor, self._group.recv([tensor], self._peer, 0))

    def abort(self) -> None:
        """Nothing to do: gloo notices by itself that its peer is gone."""

    def close(self) -> None:
        del self._group


class _GlooPending:
    def __init__(self, name: str, tensor: Tensor, work: Work) -> None:
        self._name = name
        self._tensor = tensor  # gloo reads and writes it until the work is done
        self._work = work

    def is_done(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: float) -> None:
        with _transport_errors(self._name):
            self._work.wait(timedelta(seconds=timeout))
