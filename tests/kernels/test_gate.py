"""Flags: signals set them, waits end at the count or when the host says so."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from cache_rank.kernels.gate import reference, triton

IMPLEMENTATIONS = (reference, triton)


def host_flag(device: torch.device, value: int) -> torch.Tensor:
    flag = torch.full((1,), value, dtype=torch.int32)
    return flag.pin_memory() if device.type == "cuda" else flag


def nobody(device: torch.device) -> torch.Tensor:
    """Nobody has given up waiting."""
    return torch.zeros(4, dtype=torch.int64, pin_memory=device.type == "cuda")


def test_a_signal_sets_one_flag(implementation: Any, device: torch.device) -> None:
    flags = torch.zeros(3, dtype=torch.int64, device=device)
    implementation.signal(flags, 1, torch.tensor([1 << 40], device=device))
    implementation.signal(flags, 2, torch.tensor([7, 9], device=device)[1:])
    assert flags.tolist() == [0, 1 << 40, 9]


def test_flags_count_how_often_they_are_raised(implementation: Any, device: torch.device) -> None:
    flags = torch.zeros(3, dtype=torch.int64, device=device)
    for number in (5, 0, 1 << 40, 6):
        implementation.raise_flag(flags, 1, torch.tensor([number], device=device))
    assert flags.tolist() == [0, 3, 0]
    implementation.lower_flag(flags, 1)
    implementation.raise_flag(flags, 2, torch.ones(1, dtype=torch.int64, device=device))
    assert flags.tolist() == [0, 2, 1]


def test_a_copy_follows_what_the_host_says(implementation: Any, device: torch.device) -> None:
    source, copy = host_flag(device, 0), torch.full((1,), 7, dtype=torch.int32, device=device)
    for said in (0, 1, 0):
        source[0] = said
        implementation.refresh(copy, source)
        assert copy.tolist() == [said]


@pytest.mark.parametrize("count", [5, 4])
def test_a_wait_for_what_has_happened_ends(
    implementation: Any, device: torch.device, count: int
) -> None:
    flags, given_up = torch.tensor([0, 5], device=device), nobody(device)
    awaited, waiter = torch.tensor([[count], [17]], device=device)
    implementation.wait_for(flags, 1, awaited, host_flag(device, 1), waiter, given_up)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert given_up.tolist() == [0] * 4


def test_a_wait_for_what_never_happens_ends_when_the_host_says_so(
    implementation: Any, device: torch.device
) -> None:
    flags = torch.zeros(1, dtype=torch.int64, device=device)
    accepts, given_up = host_flag(device, 1), nobody(device)
    awaited, waiter = torch.tensor([[1], [17]], device=device)

    def refuse() -> None:
        time.sleep(0.2)
        accepts[0] = 0

    thread = threading.Thread(target=refuse)
    started = time.monotonic()
    thread.start()
    implementation.wait_for(flags, 0, awaited, accepts, waiter, given_up)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert time.monotonic() - started > 0.1
    thread.join()
    assert given_up.tolist() == [0, 17, 0, 0]


@pytest.mark.gpu
def test_side_stream_waits_for_graphs_that_have_not_begun() -> None:
    """Graphs queued back to back write a counter and signal; the side stream copies it each time.

    The host queues everything ahead: a wait that did not count would let copies run early.
    """
    device = torch.device("cuda")
    flags = torch.zeros(2, dtype=torch.int64, device=device)
    tick = torch.zeros(1, dtype=torch.int64, device=device)
    value = torch.zeros(1, dtype=torch.int64, device=device)
    accepts, given_up = host_flag(device, 1), nobody(device)
    work = torch.randn(2048, 2048, device=device)
    counts = torch.arange(203, device=device)

    def body() -> None:
        triton.wait_for(
            flags, 1, value, accepts, tick, given_up
        )  # the copy of the step before is done
        tick.add_(1)
        (work @ work).sum()
        value.add_(1)
        triton.signal(flags, 0, tick)

    for call in range(2):
        body()
        triton.signal(flags, 1, counts[call + 1 :])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    side = torch.cuda.Stream()
    seen = torch.zeros(200, dtype=torch.int64, device=device)
    for step in range(200):
        graph.replay()
        with torch.cuda.stream(side):
            triton.wait_for(flags, 0, counts[step + 3 :], accepts, tick, given_up)
            seen[step : step + 1].copy_(value)
            triton.signal(flags, 1, counts[step + 3 :])
    torch.cuda.synchronize()
    assert seen.tolist() == list(range(3, 203))
