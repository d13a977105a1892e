"""Rings of pinned host memory: numbers between a host and its GPU without a call of the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache_rank.kernels.pinned_ring import collect, post
from cache_rank.kernels.pinned_ring.reference import blocks

RING_ENTRIES = 64
"""A ring holds far more entries than a host is steps ahead of its device, or behind it."""


class Field(NamedTuple):
    """A field of a ring's entries: its size, and what fills it where a step brings fewer."""

    size: int
    filler: int


def _split(tensor: Tensor, fields: Mapping[str, Field]) -> dict[str, Tensor]:
    """Split a tensor into the fields that fill it, by name: (size,) each."""
    places = tensor.split([field.size for field in fields.values()])
    return dict(zip(fields, places, strict=True))


class HostToDeviceRing:
    """A ring of integers that every step brings to a GPU.

    Work that is queued, or held by a graph, collects what the host has written, one entry a step.
    """

    def __init__(self, device: torch.device, **fields: Field) -> None:
        size = sum(field.size for field in fields.values())
        self._ring = _pinned(device, RING_ENTRIES, size)
        self._entries = [_Entry(entry, fields) for entry in self._ring]
        self._turn = 0
        self._collected = torch.zeros(blocks(size), dtype=torch.int64, device=device)
        self._on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self._views = _split(self._on_device, fields)

    def __getitem__(self, name: str) -> Tensor:
        """A field on the device, (size,) int64."""
        return self._views[name]

    def write(self, **numbers: Sequence[int]) -> None:
        """Write the numbers of the next step.

        No more than RING_ENTRIES may wait to be collected. They do not: the forward pass of a step
        waits for the one before, and the host waits for lengths after a round of drafts, so that it
        is a round and a few steps ahead at most.
        """
        self._entries[self._turn].write(numbers)
        self._turn = (self._turn + 1) % RING_ENTRIES

    def collect(self) -> None:
        """Replace all fields by those of the next step, on the current stream."""
        collect(self._ring, self._collected, self._on_device)


class _Entry:
    """The numbers of one step in host memory."""

    def __init__(self, tensor: Tensor, fields: Mapping[str, Field]) -> None:
        # Writing to an array takes the host a fraction of building a tensor from a list.
        self._fields = [
            (name, place.numpy(), fields[name].filler)
            for name, place in _split(tensor, fields).items()
        ]
        self._written = dict.fromkeys(fields, 0)
        for _, array, filler in self._fields:
            array.fill(filler)

    def write(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """Write the numbers of a step, and fillers over what is left of the step before."""
        for name, array, filler in self._fields:
            new = numbers.get(name, ())
            count, before = len(new), self._written[name]
            array[:count] = new
            if count < before:
                array[count:before] = filler
            self._written[name] = count


class DeviceToHostRing:
    """A ring of integers of a GPU, of which the host sees the newest RING_ENTRIES."""

    def __init__(self, values: Tensor) -> None:
        """Bring an int64 tensor of the device to the host, each time that `post` is queued."""
        self._values = values
        self._ring = _pinned(values.device, RING_ENTRIES, values.numel())
        self._newest = _pinned(values.device, 1, 1)[0]
        self._entries = self._ring.view(RING_ENTRIES, *values.shape).numpy()
        self._newest_seen = self._newest.numpy()

    def post(self, number: Tensor) -> None:
        """Bring the tensor as it is then, on the current stream.

        Args:
            number: (1,) int64 of the device: numbers grow; of 0, nothing is brought.
        """
        post(self._values, self._ring, self._newest, number)

    @property
    def newest(self) -> int:
        """The greatest number that has come; none before it is still to come."""
        return int(self._newest_seen[0])

    def entry(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return what came by a number, one of the newest RING_ENTRIES; changes as more come."""
        entry: np.ndarray[Any, np.dtype[np.int64]] = self._entries[number % RING_ENTRIES]
        return entry


def _pinned(device: torch.device, entries: int, width: int) -> Tensor:
    """Make host memory that a device sees, (entries, width) int64 zeros."""
    return torch.zeros((entries, width), dtype=torch.int64, pin_memory=device.type == "cuda")
