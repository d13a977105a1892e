"""Counters in memory for which the hardware that feeds a stream waits, of one GPU or two.

Unlike a kernel that polls, such a wait takes nothing of a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver  # type: ignore[import-untyped]

from cache_rank.transport import TransportError

_AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
_AFTER_WRITES = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT.value


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the CUDA driver.

    Raises:
        TransportError: what it answered.
    """
    status, *values = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise TransportError(f"{function.__name__}: {status.name}")
    return values[0] if values else None


def wait_until(stream: torch.cuda.Stream, address: int, count: int) -> None:
    """Hold a stream until an int64 of this GPU has come to `count`."""
    call(driver.cuStreamWaitValue64, stream.cuda_stream, address, count, _AT_LEAST)


def write(stream: torch.cuda.Stream, address: int, count: int) -> None:
    """Set an int64, of this GPU or a mapped one, when all earlier work of a stream is done."""
    call(driver.cuStreamWriteValue64, stream.cuda_stream, address, count, _AFTER_WRITES)
