"""Channels whose transfers are copies into the peer's memory, by the copy engines of the GPUs.

A receive lends the peer a buffer, and a send copies into it. Counters say when; the hardware that
feeds a stream waits for them:

    sender      waits until its `lent` has come to n; copies; sets the peer's `arrived` to n
    receiver    sets the peer's `lent` to n; waits until its `arrived` has come to n

so that neither copies nor waits take a multiprocessor, of which NCCL keeps several while a receive
waits. Buffers are in the memory of the GPUs, which reach each other's (CUDA IPC). Counters are in
host memory that both ranks share: a host ends waits for a peer that is gone by writing it, without
the driver, in which another thread may be waiting for the device. Both GPUs are of one machine.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver  # type: ignore[import-untyped]
from torch import Tensor

from cache_rank.stream_memory import call, wait_until, write
from cache_rank.transport import Pending, StreamPending, TransportError, queue_behind

_LENT, _ARRIVED = 0, 128
"""Where the counters of an end are in its page, in bytes."""

_ALIGNMENT = 256
_SHARED_AT_ONCE = 2 << 20
"""What a peer can map of a GPU is whole blocks of this size: nothing else should be in them."""

_SHARED_MEMORY = Path("/dev/shm")
_NAME_BYTES, _HANDLE_BYTES = 40, 64
_PEER_ACCESS = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
_FOR_DEVICES = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
_RELEASED = 1 << 62
"""More than any count, so that it ends every wait."""


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where buffers of so many bytes begin, and where the last one ends."""
    spaces = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return list(itertools.accumulate(spaces, initial=0))


class _Counters:
    """The counters of one end, in a page that both ranks share.

    Attributes:
        address: as the GPU of this process sees the page.
    """

    def __init__(self, path: Path, context: Any, creates: bool = False) -> None:
        """Map the page of a file that only this user can read; `creates` makes it, of zeros."""
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if creates else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if creates:
                os.ftruncate(descriptor, mmap.PAGESIZE)
            page = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self._page = (ctypes.c_int64 * (mmap.PAGESIZE // 8)).from_buffer(page)
        pointer = ctypes.addressof(self._page)
        call(driver.cuMemHostRegister, pointer, mmap.PAGESIZE, _FOR_DEVICES)
        weakref.finalize(self, _unregister, context, pointer, self._page).atexit = False
        self.address = int(call(driver.cuMemHostGetDevicePointer, pointer, 0))

    def release(self) -> None:
        """End every wait for these counters."""
        for counter in (_LENT, _ARRIVED):
            self._page[counter // 8] = _RELEASED


class _OwnMemory:
    """The buffers of this end, which the peer maps; freed with the last view of them."""

    def __init__(self, sizes: Sequence[int], context: Any) -> None:
        *offsets, end = _offsets(sizes)
        size = max(-(-end // _SHARED_AT_ONCE), 1) * _SHARED_AT_ONCE
        try:
            pointer = call(driver.cuMemAlloc, size)
        except TransportError:
            torch.cuda.empty_cache()  # what torch keeps of an earlier connection, for one
            pointer = call(driver.cuMemAlloc, size)
        weakref.finalize(self, _free, context, pointer).atexit = False
        call(driver.cuMemsetD8, pointer, 0, size)
        call(driver.cuCtxSynchronize)
        handle = call(driver.cuIpcGetMemHandle, pointer)
        self.handle = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
        self._address = int(pointer)
        self._buffers = list(zip(offsets, sizes, strict=True))

    def buffers(self, device: torch.device) -> list[Tensor]:
        """Views of the buffers, (bytes,) uint8 each, which keep the memory."""
        return [
            torch.as_tensor(_Bytes(self, self._address + offset, size), device=device)
            for offset, size in self._buffers
        ]


class _Bytes:
    """What torch makes a view of."""

    def __init__(self, owner: _OwnMemory, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _PeerMemory:
    """The buffers of the other end, mapped; unmapped once nothing is under way."""

    def __init__(self, handle: bytes, sizes: Sequence[int], context: Any) -> None:
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        try:
            pointer = call(driver.cuIpcOpenMemHandle, opened, _PEER_ACCESS)
        except TransportError as error:
            raise TransportError(
                f"the GPUs cannot map each other's memory here ({error}); "
                "--cache-rank-transfer-backend nccl does without"
            ) from error
        weakref.finalize(self, _unmap, context, pointer).atexit = False
        self.buffers = [int(pointer) + offset for offset in _offsets(sizes)[:-1]]


def _free(context: Any, pointer: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuMemFree(pointer)  # waits for the device


def _unmap(context: Any, pointer: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuCtxSynchronize()
    driver.cuIpcCloseMemHandle(pointer)


def _unregister(context: Any, pointer: int, page: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuCtxSynchronize()
    driver.cuMemHostUnregister(pointer)
    del page  # which has kept it mapped


class PeerChannel:
    """A channel of two ranks, each with a GPU of its own, that copies into buffers agreed before.

    Transfers are queued as those of an `NcclChannel` are, and ended by `abort` as those are.

    Attributes:
        buffers: to receive into, one a lane: (bytes,) uint8.
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
            name: for messages.
            device: of this rank.
            sends, receives: bytes of the buffers to send into and to receive into, one a lane.
            exchange: gives the peer some bytes, and returns those that it gives at the same time.

        Raises:
            TransportError: the GPUs cannot map each other's memory, or the peer went away.
        """
        torch.cuda.set_device(device)  # of this thread
        self.name = name
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.stream.synchronize()  # so that the thread has a context
        context = call(driver.cuCtxGetCurrent)
        self._own = _OwnMemory(receives, context)
        self.buffers = self._own.buffers(device)
        path = _SHARED_MEMORY / f"cache-rank-{secrets.token_hex(8)}"
        try:
            self._counters = _Counters(path, context, creates=True)
            told = exchange(path.name.ljust(_NAME_BYTES).encode() + self._own.handle)
            peer_path = _SHARED_MEMORY / Path(told[:_NAME_BYTES].decode().strip()).name
            self._peer_counters = _Counters(peer_path, context)
            self._peer = _PeerMemory(told[_NAME_BYTES:], sends, context)
            exchange(b"mapped")
        finally:
            path.unlink(missing_ok=True)
        self._sends = sends
        self._sent = self._received = 0
        self._open = True
        self._lock = threading.Lock()

    def send(self, tensor: Tensor, after: torch.cuda.Event | None = None, lane: int = 0) -> Pending:
        assert tensor.is_contiguous()
        assert tensor.nbytes <= self._sends[lane]
        queue_behind(after, self.stream)
        with self._lock:
            self._require_open()
            self._sent += 1
            wait_until(self.stream, self._counters.address + _LENT, self._sent)
            source, target = tensor.data_ptr(), self._peer.buffers[lane]
            call(driver.cuMemcpyAsync, target, source, tensor.nbytes, self.stream.cuda_stream)
            write(self.stream, self._peer_counters.address + _ARRIVED, self._sent)
        return StreamPending(tensor, self.stream)

    def receive(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, lane: int = 0
    ) -> Pending:
        assert tensor.data_ptr() == self.buffers[lane].data_ptr(), "not the buffer of this lane"
        queue_behind(after, self.stream)
        with self._lock:
            self._require_open()
            self._received += 1
            write(self.stream, self._peer_counters.address + _LENT, self._received)
            wait_until(self.stream, self._counters.address + _ARRIVED, self._received)
        return StreamPending(tensor, self.stream)

    def _require_open(self) -> None:
        if not self._open:
            raise TransportError(f"channel {self.name} is closed")

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is under way."""
        return self.stream.query()

    def abort(self) -> None:
        """End every transfer under way. Safe from any thread, and more than once.

        A peer that still runs may count on and so leave a transfer waiting: once it is gone, this
        must be called until the channel is idle.
        """
        self._open = False
        self._counters.release()

    def close(self) -> None:
        self.abort()
