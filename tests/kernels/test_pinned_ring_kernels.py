"""Letters: taken in turn, left where their number says, and none of number 0."""

from __future__ import annotations

import pytest
import torch
from cache_rank_kernels.pinned_ring import reference, triton
from torch import Tensor


@pytest.fixture(params=[reference, triton], ids=["reference", "triton"])
def implementation(request: pytest.FixtureRequest, device: torch.device):
    return request.param


def host_box(device: torch.device, letters: int, width: int) -> Tensor:
    box = torch.arange(letters * width).view(letters, width)
    return box.pin_memory() if device.type == "cuda" else box


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("width", [1, 2, 81, 1024, 1025, 5000])
def test_letters_are_taken_in_turn(implementation, device: torch.device, width: int) -> None:
    box = host_box(device, 3, width)
    turns = torch.zeros(reference.parts(width), dtype=torch.int64, device=device)
    around = torch.full((width + 2,), -7, dtype=torch.int64, device=device)
    for number in range(7):
        implementation.collect(box, turns, around[1:-1])
        assert around.tolist() == [-7, *box[number % 3].tolist(), -7]
        assert set(turns.tolist()) == {number + 1}


@pytest.mark.parametrize("shape", [(1,), (37,), (2, 6, 16), (2, 1, 300)])
def test_letters_are_left_where_their_number_says(
    implementation, device: torch.device, shape: tuple[int, ...]
) -> None:
    values = torch.arange(torch.Size(shape).numel(), device=device).view(shape)
    box, newest = host_box(device, 4, values.numel()).fill_(-1), host_box(device, 1, 1)[0]
    for number in (1, 2, 7, 1 << 40):
        given = torch.tensor([number], device=device)
        implementation.post(values + number, box, newest, given)
        settle(device)
        assert newest.tolist() == [number]
        assert box[number % 4].tolist() == (values + number).view(-1).tolist()
    before = box.clone()
    implementation.post(values, box, newest, torch.zeros(1, dtype=torch.int64, device=device))
    settle(device)
    assert torch.equal(box, before)
    assert newest.tolist() == [1 << 40]
