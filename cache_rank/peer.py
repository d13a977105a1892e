"""Channels whose transfers are copies into the peer's memory, by the copy engines of the GPUs.

A receive lends the peer a buffer, and a send copies into it. Counters in device memory say when;
the hardware that feeds a stream waits for them:

    sender      waits until its `lent` has come to n; copies; sets the peer's `arrived` to n
    receiver    sets the peer's `lent` to n; waits until its `arrived` has come to n

so that neither copies nor waits take a multiprocessor, of which NCCL keeps several while a receive
waits. Each rank waits for memory of its own alone, which it can write itself when the peer is gone.
Both GPUs are of one machine and reach each other's memory (CUDA IPC).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import driver  # type: ignore[import-untyped]
from torch import Tensor

from cache_rank.transport import Pending, StreamPending, TransportError, queue_behind

_LENT, _ARRIVED, _BUFFERS = 0, 128, 256
"""Where things are in the memory of a channel's end, in bytes; buffers are so aligned, too."""

_SHARED_AT_ONCE = 2 << 20
"""What a peer can map is whole blocks of this size: nothing else should be in them."""

_HANDLE_BYTES = 64
_AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
_AFTER_WRITES = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT.value
_PEER_ACCESS = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
_RELEASED = 1 << 62
"""More than any count, so that it ends every wait."""


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise TransportError(f"{function.__name__}: {status.name}")
    return values[0] if values else None


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where buffers of so many bytes begin, and where the last one ends."""
    spaces = (-(-size // _BUFFERS) * _BUFFERS for size in sizes)
    return list(itertools.accumulate(spaces, initial=_BUFFERS))


class _OwnMemory:
    """The counters and buffers of this end, which the peer maps; freed with its last buffer."""

    def __init__(self, sizes: Sequence[int], context: Any) -> None:
        *offsets, end = _offsets(sizes)
        size = -(-end // _SHARED_AT_ONCE) * _SHARED_AT_ONCE
        try:
            pointer = _call(driver.cuMemAlloc, size)
        except TransportError:
            torch.cuda.empty_cache()  # what torch keeps of an earlier connection, for one
            pointer = _call(driver.cuMemAlloc, size)
        weakref.finalize(self, _free, context, pointer).atexit = False
        _call(driver.cuMemsetD8, pointer, 0, size)
        _call(driver.cuCtxSynchronize)
        self.address = int(pointer)
        handle = _call(driver.cuIpcGetMemHandle, pointer)
        self.handle = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
        self._buffers = list(zip(offsets, sizes, strict=True))

    def buffers(self, device: torch.device) -> list[Tensor]:
        """Views of the buffers, (bytes,) uint8 each, which keep the memory."""
        return [
            torch.as_tensor(_Bytes(self, self.address + offset, size), device=device)
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
    """The counters and buffers of the other end, mapped; unmapped once nothing is under way."""

    def __init__(self, handle: bytes, sizes: Sequence[int], context: Any) -> None:
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        try:
            pointer = _call(driver.cuIpcOpenMemHandle, opened, _PEER_ACCESS)
        except TransportError as error:
            raise TransportError(
                f"the GPUs cannot map each other's memory here ({error}); "
                "--cache-rank-transfer-backend nccl does without"
            ) from error
        weakref.finalize(self, _unmap, context, pointer).atexit = False
        self.address = int(pointer)
        self.buffers = [self.address + offset for offset in _offsets(sizes)[:-1]]


def _free(context: Any, pointer: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuMemFree(pointer)  # waits for the device


def _unmap(context: Any, pointer: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuCtxSynchronize()
    driver.cuIpcCloseMemHandle(pointer)


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
        self._context = _call(driver.cuCtxGetCurrent)
        # Of the same priority, so that no stream on which graphs are captured is among them.
        self._releasing = torch.cuda.Stream(device, priority=-1)
        self._own = own = _OwnMemory(receives, self._context)
        self.buffers = own.buffers(device)
        self._peer = _PeerMemory(exchange(own.handle), sends, self._context)
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
            self._wait_for(_LENT, self._sent)
            source, target = tensor.data_ptr(), self._peer.buffers[lane]
            _call(driver.cuMemcpyAsync, target, source, tensor.nbytes, self.stream.cuda_stream)
            self._set(self.stream, self._peer.address + _ARRIVED, self._sent)
        return StreamPending(tensor, self.stream)

    def receive(
        self, tensor: Tensor, after: torch.cuda.Event | None = None, lane: int = 0
    ) -> Pending:
        assert tensor.data_ptr() == self.buffers[lane].data_ptr(), "not the buffer of this lane"
        queue_behind(after, self.stream)
        with self._lock:
            self._require_open()
            self._received += 1
            self._set(self.stream, self._peer.address + _LENT, self._received)
            self._wait_for(_ARRIVED, self._received)
        return StreamPending(tensor, self.stream)

    def _require_open(self) -> None:
        if not self._open:
            raise TransportError(f"channel {self.name} is closed")

    def _wait_for(self, counter: int, count: int) -> None:
        address = self._own.address + counter
        _call(driver.cuStreamWaitValue64, self.stream.cuda_stream, address, count, _AT_LEAST)

    def _set(self, stream: torch.cuda.Stream, address: int, count: int) -> None:
        _call(driver.cuStreamWriteValue64, stream.cuda_stream, address, count, _AFTER_WRITES)

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
        _call(driver.cuCtxSetCurrent, self._context)
        for counter in (_LENT, _ARRIVED):
            self._set(self._releasing, self._own.address + counter, _RELEASED)

    def close(self) -> None:
        self.abort()
