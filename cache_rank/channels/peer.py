"""Channels whose transfers are copies into the peer's memory, by the copy engines of the GPUs.

A receive lends the peer a buffer, and a send copies into it. Two flags of each buffer say when;
the hardware that feeds a stream waits for them:

    sender      takes its `lent`; copies; raises the peer's `arrived`
    receiver    raises the peer's `lent`; takes its `arrived`

so that neither copies nor waits take a multiprocessor, of which NCCL keeps several while a receive
waits. Buffers are in the memory of the GPUs, which reach each other's (CUDA IPC). Flags are in host
memory that both ranks share: a host ends waits for a peer that is gone by writing it, without the
driver, in which another thread may be waiting for the device. Both GPUs are of one machine.

A transfer is the same calls every time, so graphs can hold it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver  # type: ignore[import-untyped]
from torch import Tensor

from cache_rank.channels.stream_memory import FlagMoves, call
from cache_rank.channels.transport import Pending, StreamPending, TransportError, queue_behind

_LENT, _ARRIVED = 0, 64
"""The flags of a buffer are at these offsets in its end's memory."""

_FLAG_BYTES = 128
"""The flags of the next buffer begin so many bytes further."""

_RAISE_SECONDS = 1e-3
"""All flags are raised again after this time, as long as a peer that is gone may lower some."""

_ALIGNMENT = 256
_SHARED_AT_ONCE = 2 << 20
"""A peer maps a GPU's memory in whole blocks of this size: nothing else should be in them."""

_SHARED_MEMORY = Path("/dev/shm")
_NAME_BYTES, _HANDLE_BYTES = 40, 64
_PEER_ACCESS = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
_FOR_DEVICES = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where buffers of so many bytes begin, and where the last one ends."""
    spaces = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return list(itertools.accumulate(spaces, initial=0))


class _Flags:
    """The flags of one end, in host memory that both ranks share.

    Attributes:
        address: their address as the GPU of this process sees it.
    """

    def __init__(self, path: Path, buffers: int, context: Any, creates: bool = False) -> None:
        """Map a file that only this user can read; `creates` makes it, of zeros."""
        size = -(-buffers * _FLAG_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        how = os.O_RDWR | (os.O_CREAT | os.O_EXCL if creates else 0)
        descriptor = os.open(path, how, 0o600)
        try:
            if creates:
                os.ftruncate(descriptor, size)
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._held = (ctypes.c_int64 * (size // 8)).from_buffer(mapped)
        pointer = ctypes.addressof(self._held)
        call(driver.cuMemHostRegister, pointer, size, _FOR_DEVICES)
        weakref.finalize(self, _unregister, context, pointer, self._held).atexit = False
        self.address = int(call(driver.cuMemHostGetDevicePointer, pointer, 0))

    def of(self, index: int, flag: int) -> int:
        """A flag's address, as the GPU of this process sees it."""
        return self.address + index * _FLAG_BYTES + flag

    def raise_all(self) -> None:
        """End what is waiting for any of these flags now."""
        self._held[:] = [1] * len(self._held)


class _ReceiveBuffers:
    """The memory that this end receives into, which the peer maps; freed with its last view."""

    def __init__(self, sizes: Sequence[int], context: Any) -> None:
        *offsets, end = _offsets(sizes)
        size = max(-(-end // _SHARED_AT_ONCE), 1) * _SHARED_AT_ONCE
        try:
            pointer = call(driver.cuMemAlloc, size)
        except TransportError:
            torch.cuda.empty_cache()  # what torch keeps of an earlier connection, for one
            try:
                pointer = call(driver.cuMemAlloc, size)
            except TransportError as error:
                raise TransportError(
                    f"no room for {size / 1e9:.2f} GB of messages ({error}): lower "
                    "--max-sparse-requests, --max-swap-tokens or --mem-fraction-static"
                ) from error
        weakref.finalize(self, _free, context, pointer).atexit = False
        call(driver.cuMemsetD8, pointer, 0, size)
        call(driver.cuCtxSynchronize)
        handle = call(driver.cuIpcGetMemHandle, pointer)
        self.handle = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
        self._address = int(pointer)
        self._buffers = list(zip(offsets, sizes, strict=True))

    def views(self, device: torch.device) -> list[Tensor]:
        """Make views of the buffers, (bytes,) uint8 each, which keep the memory."""
        return [
            torch.as_tensor(_CudaArray(self, self._address + offset, size), device=device)
            for offset, size in self._buffers
        ]


class _CudaArray:
    """A piece of memory in the form that torch makes a view of."""

    def __init__(self, owner: _ReceiveBuffers, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _SendBuffers:
    """The memory that the peer receives into, mapped; unmapped once nothing is under way."""

    def __init__(self, handle: bytes, sizes: Sequence[int], context: Any) -> None:
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        try:
            pointer = call(driver.cuIpcOpenMemHandle, opened, _PEER_ACCESS)
        except TransportError as error:
            raise TransportError(
                f"the GPUs cannot map each other's memory here ({error}); "
                "cache_rank_transfer_backend nccl, a key of --cache-rank-config, does without"
            ) from error
        weakref.finalize(self, _unmap, context, pointer).atexit = False
        self.addresses = [int(pointer) + offset for offset in _offsets(sizes)[:-1]]


def _free(context: Any, pointer: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuMemFree(pointer)  # waits for the device


def _unmap(context: Any, pointer: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuCtxSynchronize()
    driver.cuIpcCloseMemHandle(pointer)


def _unregister(context: Any, pointer: int, held: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuCtxSynchronize()
    driver.cuMemHostUnregister(pointer)
    del held  # which has kept it mapped


class PeerChannel:
    """A channel of two ranks, each with a GPU of its own, that copies into buffers agreed before.

    Transfers are queued as those of an `NcclChannel` are. `abort` ends them, and keeps ending what
    is still to come, until `finish` has seen that nothing is.

    Attributes:
        buffers: the buffers to receive into: (bytes,) uint8 each.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        sends: Sequence[int],
        receives: Sequence[int],
        exchange: Callable[[bytes], bytes],
    ) -> None:
        """Form the channel; both ranks call this at about the same time.

        Args:
            sends, receives: bytes of the buffers to send into and to receive into.
            exchange: gives the peer some bytes, and returns those that it gives at the same time.

        Raises:
            TransportError: the GPUs cannot map each other's memory, or the peer went away.
        """
        torch.cuda.set_device(device)  # it is a setting of this thread
        self.name = name
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.stream.synchronize()  # so that the thread has a context
        context = call(driver.cuCtxGetCurrent)
        # The peer maps this memory even where it holds no buffer.
        self._receive_buffers = _ReceiveBuffers(receives, context)
        self.buffers = self._receive_buffers.views(device)
        path = _SHARED_MEMORY / f"cache-rank-{secrets.token_hex(8)}"
        buffers = max(len(sends), len(receives))
        try:
            self._flags = _Flags(path, buffers, context, creates=True)
            told = exchange(path.name.ljust(_NAME_BYTES).encode() + self._receive_buffers.handle)
            peer_path = _SHARED_MEMORY / Path(told[:_NAME_BYTES].decode().strip()).name
            self._peer_flags = _Flags(peer_path, buffers, context)
            peer_path.unlink(missing_ok=True)  # the peer may be killed before it does
            self._send_buffers = _SendBuffers(told[_NAME_BYTES:], sends, context)
            exchange(b"mapped")
        finally:
            path.unlink(missing_ok=True)
        self._sends = sends
        flags, peers = self._flags, self._peer_flags
        self._takes_lent = [
            FlagMoves(taken=[flags.of(index, _LENT)]) for index in range(len(sends))
        ]
        self._raises_arrived = [
            FlagMoves(raised=[peers.of(index, _ARRIVED)]) for index in range(len(sends))
        ]
        self._receives = [
            FlagMoves(raised=[peers.of(index, _LENT)], taken=[flags.of(index, _ARRIVED)])
            for index in range(len(receives))
        ]
        self._open = True
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._ending: threading.Thread | None = None
        self._starting = threading.Lock()

    def send(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, buffer_index: int = 0
    ) -> Pending:
        assert tensor.is_contiguous()
        assert tensor.nbytes <= self._sends[buffer_index]
        queue_behind(after, self.stream)
        with self.queueing():
            self._takes_lent[buffer_index].queue(self.stream)
            source, target = tensor.data_ptr(), self._send_buffers.addresses[buffer_index]
            call(driver.cuMemcpyAsync, target, source, tensor.nbytes, self.stream.cuda_stream)
            self._raises_arrived[buffer_index].queue(self.stream)
        return StreamPending(tensor, self.stream)

    def receive(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, buffer_index: int = 0
    ) -> Pending:
        assert tensor.data_ptr() == self.buffers[buffer_index].data_ptr(), (
            "not the buffer at this index"
        )
        queue_behind(after, self.stream)
        with self.queueing():
            self._receives[buffer_index].queue(self.stream)
        return StreamPending(tensor, self.stream)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Hold the channel open while transfers, or a graph that holds some, are queued inside.

        Raises:
            TransportError: the channel is closed.
        """
        with self._lock:
            if not self._open:
                raise TransportError(f"channel {self.name} is closed")
            yield

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is under way; after `abort`, whether none will ever be."""
        return not self._lock.locked() and self.stream.query()

    def abort(self) -> None:
        """End every transfer under way, until `finish`. Safe from any thread, and more than once.

        Transfers that are queued lower the flags that they take, and a peer that still runs its
        own. So a thread raises all flags again and again, and asks nothing of the driver, in which
        another thread may be waiting for these very transfers.
        """
        self._open = False
        with self._starting:
            if self._ending is None:
                self._ending = threading.Thread(target=self._end_transfers, daemon=True)
                self._ending.start()

    def _end_transfers(self) -> None:
        self._flags.raise_all()
        while not self._finished.wait(_RAISE_SECONDS):
            self._flags.raise_all()

    def finish(self, timeout: float) -> bool:
        """Abort until nothing is under way any more.

        Returns:
            Whether that came within `timeout` seconds.
        """
        self.abort()
        deadline = time.monotonic() + timeout
        while not (idle := self.is_idle) and time.monotonic() < deadline:
            time.sleep(_RAISE_SECONDS)
        if idle:
            self._finished.set()
        return idle

    def close(self) -> None:
        self.abort()
