"""Flags in memory for which the hardware that feeds a stream waits, of one GPU or two.

Unlike a kernel that polls, such a wait takes nothing of a multiprocessor. A flag is an int64, and
raised when it is at least 1. To take a flag of 0 or 1 is to wait for it and to write 0, so that the
same moves serve every step, and graphs can hold them. Flags that count (kernels/gate) are awaited
here, and lowered by a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import driver  # type: ignore[import-untyped]

from cache_rank.channels.transport import TransportError

_AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
_AFTER_WRITES = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT.value
_WAIT = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_64
_WRITE = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_64


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the CUDA driver.

    Raises:
        TransportError: the driver's error.
    """
    status, *values = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise TransportError(f"{function.__name__}: {status.name}")
    return values[0] if values else None


def launch(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Replay a graph on a stream, without the switches of streams that torch needs for it.

    Raises:
        TransportError: the driver's error.
    """
    call(driver.cuGraphLaunch, graph.raw_cuda_graph_exec(), stream.cuda_stream)


class FlagMoves:
    """Flags that a stream raises, then those that it waits for, then those that it takes."""

    def __init__(
        self,
        raised: Sequence[int] = (),
        awaited: Sequence[int] = (),
        taken: Sequence[int] = (),
    ) -> None:
        """Take the addresses of flags, which are in memory of this GPU or of the host.

        Those that are raised may be in that of another GPU, too; those that are taken are 0 or 1.
        """
        self._operations = [_write(address, 1) for address in raised]
        self._operations += [_wait(address) for address in awaited]
        for address in taken:
            self._operations += _wait(address), _write(address, 0)

    def queue(self, stream: torch.cuda.Stream) -> None:
        """Raise flags when all earlier work of a stream is done.

        Then the stream waits for those that are awaited and those that are taken, one by one.
        """
        operations = self._operations
        call(driver.cuStreamBatchMemOp, stream.cuda_stream, len(operations), operations, 0)


def _wait(address: int) -> Any:
    operation = driver.CUstreamBatchMemOpParams()
    operation.waitValue.operation = _WAIT
    operation.waitValue.address = address
    operation.waitValue.value64 = 1
    operation.waitValue.flags = _AT_LEAST
    return operation


def _write(address: int, value: int) -> Any:
    operation = driver.CUstreamBatchMemOpParams()
    operation.writeValue.operation = _WRITE
    operation.writeValue.address = address
    operation.writeValue.value64 = value
    operation.writeValue.flags = _AFTER_WRITES
    return operation
