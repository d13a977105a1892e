"""Numbers of steps between a host and its device."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.two_ranks.exchange.pinned_ring import (
    RING_ENTRIES,
    DeviceToHostRing,
    Field,
    HostToDeviceRing,
)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def test_numbers_of_a_step_are_always_at_the_same_place(device: torch.device) -> None:
    numbers = HostToDeviceRing(device, step=Field(1, 0), rows=Field(4, -1), lengths=Field(2, 1))
    places = [numbers[name].data_ptr() for name in ("step", "rows", "lengths")]

    def next_step() -> list[list[int]]:
        numbers.collect()
        assert [numbers[name].data_ptr() for name in ("step", "rows", "lengths")] == places
        return [numbers[name].tolist() for name in ("step", "rows", "lengths")]

    for step in range(2 * RING_ENTRIES + 1):
        numbers.write(step=[step], rows=[step + 2**40, -5, 3], lengths=[8, 9])
        assert next_step() == [[step], [step + 2**40, -5, 3, -1], [8, 9]]
    for step in range(RING_ENTRIES):  # no entry has anything left of an older step
        numbers.write(step=[step], lengths=[4])
        assert next_step() == [[step], [-1, -1, -1, -1], [4, 1]]


def test_a_host_that_is_ahead_changes_nothing_of_the_steps_before(device: torch.device) -> None:
    numbers = HostToDeviceRing(device, step=Field(1, 0))
    for step in range(RING_ENTRIES):
        numbers.write(step=[step])
    for step in range(RING_ENTRIES):
        numbers.collect()
        assert numbers["step"].tolist() == [step]


def test_more_numbers_than_a_field_has_are_refused(device: torch.device) -> None:
    numbers = HostToDeviceRing(device, rows=Field(2, -1), lengths=Field(2, 1))
    with pytest.raises(ValueError, match="3"):
        numbers.write(rows=[1, 2, 3])


def test_the_host_sees_the_newest_letters(device: torch.device) -> None:
    values = torch.zeros((2, 3), dtype=torch.int64, device=device)
    ring = DeviceToHostRing(values)
    assert ring.newest == 0
    numbers = [3 * step + 1 for step in range(RING_ENTRIES + 2)]
    seen = []
    for number in numbers:
        values.fill_(number)
        values[1, 2] = 2**40
        ring.post(torch.tensor([number], device=device))
        ring.post(torch.zeros(1, dtype=torch.int64, device=device))
        values.fill_(-1)
        settle(device)
        assert ring.newest == number
        seen.append(ring.entry(number).tolist())
    assert seen == [[[n, n, n], [n, n, 2**40]] for n in numbers]
    assert ring.entry(numbers[-5]).tolist() == seen[-5]


@pytest.mark.gpu
def test_graphs_hold_both_ways() -> None:
    """A graph that is replayed brings the numbers of its step, and theirs back."""
    device = torch.device("cuda")
    numbers = HostToDeviceRing(device, step=Field(1, 0), row=Field(2, -1))
    result = torch.zeros(2, dtype=torch.int64, device=device)
    ring = DeviceToHostRing(result)

    def step() -> None:
        numbers.collect()
        result.copy_(numbers["row"])
        result.mul_(2)
        ring.post(numbers["step"])

    numbers.write()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(1, 5 * RING_ENTRIES):
        numbers.write(step=[number], row=[number, 7 - number])
        graph.replay()
        if number % (RING_ENTRIES - 3) == 0:
            torch.cuda.synchronize()
            for earlier in range(number - RING_ENTRIES + 4, number + 1):
                assert ring.entry(earlier).tolist() == [2 * earlier, 14 - 2 * earlier]
    torch.cuda.synchronize()
    assert ring.newest == 5 * RING_ENTRIES - 1
