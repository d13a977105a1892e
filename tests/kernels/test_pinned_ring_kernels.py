"""Rows of pinned rings: read in turn, written where their number says, and not for number 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.pinned_ring import reference, triton

IMPLEMENTATIONS = (reference, triton)


def host_ring(device: torch.device, rows: int, width: int) -> Tensor:
    ring = torch.arange(rows * width).view(rows, width)
    return ring.pin_memory() if device.type == "cuda" else ring


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("width", [1, 2, 81, 1024, 1025, 5000])
def test_rows_are_read_in_turn(implementation: Any, device: torch.device, width: int) -> None:
    ring = host_ring(device, 3, width)
    collected = torch.zeros(reference.blocks(width), dtype=torch.int64, device=device)
    around = torch.full((width + 2,), -7, dtype=torch.int64, device=device)
    for number in range(7):
        implementation.collect(ring, collected, around[1:-1])
        assert around.tolist() == [-7, *ring[number % 3].tolist(), -7]
        assert set(collected.tolist()) == {number + 1}


@pytest.mark.parametrize("shape", [(1,), (37,), (2, 6, 16), (2, 1, 300)])
def test_rows_are_written_where_their_number_says(
    implementation: Any, device: torch.device, shape: tuple[int, ...]
) -> None:
    values = torch.arange(torch.Size(shape).numel(), device=device).view(shape)
    ring, newest = host_ring(device, 4, values.numel()).fill_(-1), host_ring(device, 1, 1)[0]
    for number in (1, 2, 7, 1 << 40):
        given = torch.tensor([number], device=device)
        implementation.post(values + number, ring, newest, given)
        settle(device)
        assert newest.tolist() == [number]
        assert ring[number % 4].tolist() == (values + number).view(-1).tolist()
    before = ring.clone()
    implementation.post(values, ring, newest, torch.zeros(1, dtype=torch.int64, device=device))
    settle(device)
    assert torch.equal(ring, before)
    assert newest.tolist() == [1 << 40]
