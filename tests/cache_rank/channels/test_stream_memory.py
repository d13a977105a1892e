"""Flags that streams wait for in hardware."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cache_rank.channels.stream_memory import FlagMoves
from cache_rank.kernels.gate import triton as gate

pytestmark = pytest.mark.gpu


def address(flags: Tensor, index: int) -> int:
    return flags.data_ptr() + index * flags.itemsize


def test_a_flag_that_counts_is_taken_as_often_as_it_was_raised() -> None:
    """Whoever takes comes late: two raises must not have become one."""
    flags = torch.zeros(2, dtype=torch.int64, device="cuda")
    number = torch.ones(1, dtype=torch.int64, device="cuda")
    taken = torch.zeros(1, dtype=torch.int64, device="cuda")
    gate.lower_flag(flags, 0)
    flags.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    wait = FlagMoves(awaited=[address(flags, 1)])
    for _ in range(3):
        gate.raise_flag(flags, 1, number)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(4):
            wait.queue(stream)
            gate.lower_flag(flags, 1)
            taken.add_(1)
    while int(taken) < 3:
        pass
    assert not stream.query()
    gate.raise_flag(flags, 1, number)
    torch.cuda.synchronize()
    assert (int(taken), flags.tolist()) == (4, [0, 0])


def test_flags_of_host_memory_are_raised_and_taken_in_order() -> None:
    flags = torch.zeros(3, dtype=torch.int64).pin_memory()
    seen = torch.zeros(2, dtype=torch.int64, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    seen[1:].add_(5)  # kernels that are not loaded yet would wait for a stream that is held
    seen[:1].add_(seen[1:])
    seen.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        FlagMoves(taken=[address(flags, 0), address(flags, 1)]).queue(streams[0])
        seen[:1].add_(seen[1:])
    with torch.cuda.stream(streams[1]):
        seen[1:].add_(5)
        FlagMoves(raised=[address(flags, 0)], taken=[address(flags, 2)]).queue(streams[1])
        FlagMoves(raised=[address(flags, 1)]).queue(streams[1])
    assert not any(stream.query() for stream in streams)
    flags[2] = 1  # the host may raise them, too
    torch.cuda.synchronize()
    assert seen.tolist() == [5, 5]
    assert flags.tolist() == [0, 0, 0]
