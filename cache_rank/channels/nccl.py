"""Point-to-point channels over NCCL, between two GPUs of one machine.

Torch's own process groups bring a watchdog that ends the process when a transfer does not come, and
streams of their own. Here a lost peer must cost a step, and transfers belong on streams that the
exchange orders itself; so this file calls the library that torch ships, through ctypes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from cache_rank.channels.transport import (
    INFERENCE,
    Pending,
    StreamPending,
    TransportError,
    queue_behind,
)

_UNIQUE_ID_BYTES = 128
_UINT8 = 1  # ncclUint8
_MAX_CHANNELS = "2"
"""A receive that waits occupies this many multiprocessors, and the forward pass feels it: kernels
of as many programs as there are multiprocessors then take two turns."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * _UNIQUE_ID_BYTES),)


def prepare_environment(environment: MutableMapping[str, str], address: str) -> None:
    """Set what NCCL reads, where the user has not, and how many queues a device has.

    Must happen before the first communicator, and before CUDA starts.
    """
    defaults = {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_P2P_NCHANNELS": _MAX_CHANNELS,
    }
    if address in ("127.0.0.1", "localhost", "::1"):
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    for name, value in defaults.items():
        environment.setdefault(name, value)
    # SGLang sets 8. Streams that share a hardware queue wait for each other, and there are more
    # than 8 with the exchange's, of which one may be waiting for the peer.
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"


class _Library:
    def __init__(self) -> None:
        # Torch has loaded it; this finds that one by its name.
        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclCommInitRank.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            _UniqueId,
            ctypes.c_int,
        ]
        for name in ("ncclSend", "ncclRecv"):
            getattr(self._library, name).argtypes = [
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_void_p,
            ]
        self._library.ncclCommAbort.argtypes = [ctypes.c_void_p]

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.ncclGetErrorString(status).decode()
            raise TransportError(f"{name}: {text}")


def unique_id() -> bytes:
    """What two ranks must share to form one channel; made by the inference rank."""
    made = _UniqueId()
    _Library().call("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


class NcclChannel:
    """A channel of two ranks, each with a GPU of its own.

    A transfer is queued on the channel's own stream, and `wait` of its Pending makes the current
    stream wait for it, not the host. When the peer is lost, `abort` ends the transfers under way
    with arbitrary contents; who uses them must know, as the exchange does.
    """

    def __init__(
        self, name: str, rendezvous: bytes, rank: int, device: torch.device, timeout: float
    ) -> None:
        """Form the channel; both ranks call this at about the same time.

        Raises:
            TransportError: the peer did not appear within `timeout` seconds, or NCCL failed.
        """
        torch.cuda.set_device(device)  # of this thread
        self.name = name
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._peer = 1 - rank
        self._device = device
        self._library = _Library()
        self._communicator = ctypes.c_void_p()
        self._open = True
        self._lock = threading.Lock()
        failure: list[Exception] = []

        def form() -> None:
            try:
                torch.cuda.set_device(device)
                shared = _UniqueId.from_buffer_copy(rendezvous)
                self._library.call(
                    "ncclCommInitRank", ctypes.byref(self._communicator), 2, shared, rank
                )
            except Exception as error:
                failure.append(error)

        # NCCL waits for its peer without a deadline.
        thread = threading.Thread(target=form, daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            raise TransportError(f"channel {name}: the peer did not appear in {timeout:g} s")
        if failure:
            raise TransportError(f"channel {name}: {failure[0]}")
        self._connect(rank, timeout)

    def _connect(self, rank: int, timeout: float) -> None:
        """Exchange a tensor, so that the connection is built now and not in the first step."""
        probe = torch.zeros(1 << 20, dtype=torch.uint8, device=self._device)
        sends = (rank == INFERENCE) == (self.name != "down")
        (self.send(probe) if sends else self.receive(probe)).wait(timeout)
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

    def send(self, tensor: Tensor, after: torch.cuda.Event | None = None, lane: int = 0) -> Pending:
        return self._transfer("ncclSend", tensor, after)

    def receive(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, lane: int = 0
    ) -> Pending:
        return self._transfer("ncclRecv", tensor, after)

    def _transfer(self, name: str, tensor: Tensor, after: torch.cuda.Event | None) -> Pending:
        assert tensor.is_contiguous()
        queue_behind(after, self.stream)
        with self._lock:
            if not self._open:
                raise TransportError(f"channel {self.name} is closed")
            self._library.call(
                name,
                tensor.data_ptr(),
                tensor.nbytes,
                _UINT8,
                self._peer,
                self._communicator,
                self.stream.cuda_stream,
            )
        return StreamPending(tensor, self.stream)

    def abort(self) -> None:
        """End every transfer under way. Safe from any thread, and more than once."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._library.call("ncclCommAbort", self._communicator)

    def close(self) -> None:
        self.abort()
