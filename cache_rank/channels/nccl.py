"""Point-to-point channels over NCCL, between two GPUs of one machine.

Torch's own process groups were slow to let a lost peer go: on an H100 with torch 2.11, two of
them aborted within a second, but to delete a `ProcessGroupNCCL` then took 59 s, and its watchdog
printed stack traces. Here a lost peer must cost a step. So this file calls NCCL through
NVIDIA's bindings, nccl4py, which load the library that torch ships. They are imported where a
communicator is made: ranks on CPUs need none.

What the bindings lack is a deadline: NCCL waits for a peer, and for its transfers, without one. So
two short threads wait for NCCL here, and the caller waits for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cache_rank.channels.transport import (
    INFERENCE,
    Pending,
    StreamPending,
    TransportError,
    queue_behind,
)

if TYPE_CHECKING:
    from nccl.core import Communicator

_MAX_CTAS = {"up": 2, "down": 2, "bulk": 16}
"""The most programs of NCCL on each channel; a transfer runs half as many.

A transfer that waits occupies a multiprocessor with each of them, and a kernel with a program for
every multiprocessor then takes two turns. So only the bulk channel, which carries prompts and what
verifications wait for, has many.
"""


def prepare_environment(environment: MutableMapping[str, str], address: str) -> None:
    """Set what NCCL reads, where the user has not, and how many queues a device has.

    This must happen before the first communicator is made, and before CUDA starts.
    """
    defaults = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    if address in ("127.0.0.1", "localhost", "::1"):
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    for name, value in defaults.items():
        environment.setdefault(name, value)
    # SGLang sets 8. Streams that share a hardware queue wait for each other, and there are more
    # than 8 with the exchange's, of which one may be waiting for the peer.
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"


def unique_id() -> bytes:
    """Make what two ranks must share to form one channel; the inference rank makes it."""
    from nccl.core import get_unique_id

    with _transport_errors("ncclGetUniqueId"):
        return bytes(get_unique_id())


@contextlib.contextmanager
def _transport_errors(what: str) -> Iterator[None]:
    """Raise errors of NCCL as TransportError."""
    from nccl.bindings.nccl import NCCLError  # type: ignore[import-untyped]
    from nccl.core import NcclInvalid

    try:
        yield
    except (NCCLError, NcclInvalid) as error:
        raise TransportError(f"{what}: {error}") from error


class NcclChannel:
    """A channel of two ranks, each with a GPU of its own.

    A transfer is queued on the channel's own stream, and `wait` of its Pending makes the current
    stream wait for it, not the host. When the peer is lost, `abort` ends the transfers under way
    with arbitrary contents; whoever reads them must know that, as the exchange does.
    """

    def __init__(
        self, name: str, rendezvous: bytes, rank: int, device: torch.device, timeout: float
    ) -> None:
        """Form the channel; both ranks call this at about the same time.

        Raises:
            TransportError: the peer did not appear within `timeout` seconds, or NCCL failed.
        """
        torch.cuda.set_device(device)  # it is a setting of this thread
        self.name = name
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._peer = 1 - rank
        self._device = device
        self._open = True
        self._lock = threading.Lock()
        self._communicator = self._form(rendezvous, rank, timeout)
        self._connect(rank, timeout)

    def _form(self, rendezvous: bytes, rank: int, timeout: float) -> Communicator:
        """Meet the peer, on a thread: NCCL waits for it without a deadline."""
        from nccl.core import Communicator, NCCLConfig, UniqueId

        config = NCCLConfig(max_ctas=_MAX_CTAS[self.name])
        formed: list[Communicator] = []
        failures: list[Exception] = []

        def form() -> None:
            try:
                torch.cuda.set_device(self._device)
                meeting = UniqueId.from_bytes(rendezvous)
                formed.append(Communicator.init(2, rank, meeting, config))
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=form, daemon=True)
        thread.start()
        thread.join(timeout)
        if failures:
            raise TransportError(f"channel {self.name}: {failures[0]}")
        if not formed:
            raise TransportError(f"channel {self.name}: the peer did not appear in {timeout:g} s")
        return formed[0]

    def _connect(self, rank: int, timeout: float) -> None:
        """Exchange a tensor, so that the connection is built now and not in the first step.

        On the bulk channel it comes back.
        """
        probe = torch.zeros(1 << 20, dtype=torch.uint8, device=self._device)
        ways: list[Callable[[Tensor], Pending]] = [self.send, self.receive]
        if (rank == INFERENCE) == (self.name == "down"):
            ways.reverse()
        for transfer in ways if self.name == "bulk" else ways[:1]:
            transfer(probe).wait(timeout)
        self._finish(timeout)

    def exchange(self, given: bytes, timeout: float) -> bytes:
        """Give the peer some bytes and return as many that it gives; the host waits.

        Raises:
            TransportError: it gave none within `timeout` seconds.
        """
        sent = torch.frombuffer(bytearray(given), dtype=torch.uint8).to(self._device)
        received = torch.empty_like(sent)
        # In the same order on both sides, as on any channel.
        transfers = [(self.send, sent), (self.receive, received)]
        for transfer, tensor in transfers if self._peer != INFERENCE else reversed(transfers):
            transfer(tensor)
        self._finish(timeout)
        return bytes(received.tolist())

    def _finish(self, timeout: float) -> None:
        """Let the host wait for all transfers."""
        done = threading.Event()

        def finish() -> None:
            torch.cuda.set_device(self._device)
            self.stream.synchronize()
            done.set()

        threading.Thread(target=finish, daemon=True).start()
        if not done.wait(timeout):
            self.abort()
            raise TransportError(f"channel {self.name}: no answer in {timeout:g} s")

    def send(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, buffer_index: int = 0
    ) -> Pending:
        return self._transfer(self._communicator.send, tensor, after)

    def receive(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, buffer_index: int = 0
    ) -> Pending:
        return self._transfer(self._communicator.recv, tensor, after)

    def _transfer(
        self, transfer: Callable[..., None], tensor: Tensor, after: torch.cuda.Event | None
    ) -> Pending:
        assert tensor.is_contiguous()
        queue_behind(after, self.stream)
        with self._lock:
            if not self._open:
                raise TransportError(f"channel {self.name} is closed")
            with _transport_errors(f"channel {self.name}"):
                transfer(tensor, self._peer, stream=self.stream.cuda_stream)
        return StreamPending(tensor, self.stream)

    def abort(self) -> None:
        """End every transfer under way. Safe from any thread, and more than once."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        with _transport_errors(f"channel {self.name}"):
            self._communicator.abort()

    def close(self) -> None:
        self.abort()
