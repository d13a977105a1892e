"""Numbers between a host and its GPU without a call of the driver: in host memory that both see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from cache_rank_kernels.pinned_ring.reference import blocks
from torch import Tensor

from cache_rank.operations import implementation_for

LETTERS = 16
"""That a box holds: far more than the steps that a host is ahead of its device, or behind it."""


class Field(NamedTuple):
    """A place for so many numbers, and what stands where a step brings fewer."""

    size: int
    filler: int


def _split(tensor: Tensor, fields: Mapping[str, Field]) -> dict[str, Tensor]:
    """The places of fields that fill a tensor together, by name: (size,) each."""
    places = tensor.split([field.size for field in fields.values()])
    return dict(zip(fields, places, strict=True))


class Outbox:
    """Integers that every step brings to a GPU without a call of the driver.

    Work that is queued, or held by a graph, collects what the host has written, one step after the
    other.
    """

    def __init__(self, device: torch.device, **fields: Field) -> None:
        size = sum(field.size for field in fields.values())
        self._box = _box(device, LETTERS, size)
        self._kernels = _kernels(device)
        self._letters = [_Letter(letter, fields) for letter in self._box]
        self._turn = 0
        self._collected = torch.zeros(blocks(size), dtype=torch.int64, device=device)
        self._on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self._views = _split(self._on_device, fields)

    def __getitem__(self, name: str) -> Tensor:
        """A field on the device, (size,) int64."""
        return self._views[name]

    def write(self, **numbers: Sequence[int]) -> None:
        """Write the numbers of the next step. No more than LETTERS may wait to be collected: the
        forward pass of a step waits for the one before, so that a host is a few ahead at most.
        """
        self._letters[self._turn].write(numbers)
        self._turn = (self._turn + 1) % LETTERS

    def collect(self) -> None:
        """Replace all fields by those of the next step, on the current stream."""
        self._kernels.collect(self._box, self._collected, self._on_device)


class _Letter:
    """The numbers of a step in host memory."""

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


class Inbox:
    """Integers of a GPU that the host sees without a call of the driver, the newest LETTERS."""

    def __init__(self, values: Tensor) -> None:
        """Bring a tensor, int64."""
        self._values = values
        self._box = _box(values.device, LETTERS, values.numel())
        self._newest = _box(values.device, 1, 1)[0]
        self._letters = self._box.view(LETTERS, *values.shape).numpy()
        self._newest_seen = self._newest.numpy()
        self._kernels = _kernels(values.device)

    def post(self, number: Tensor) -> None:
        """Bring the tensor as it is then, on the current stream.

        Args:
            number: (1,) int64 of the device: numbers grow; of 0, nothing is brought.
        """
        self._kernels.post(self._values, self._box, self._newest, number)

    @property
    def newest(self) -> int:
        """The greatest number that has come; not one before it is still to come."""
        return int(self._newest_seen[0])

    def letter(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """What came by a number, which is one of the newest LETTERS; changes when more come."""
        letter: np.ndarray[Any, np.dtype[np.int64]] = self._letters[number % LETTERS]
        return letter


def _box(device: torch.device, letters: int, width: int) -> Tensor:
    """Host memory that a device sees, (letters, width) int64 zeros."""
    return torch.zeros((letters, width), dtype=torch.int64, pin_memory=device.type == "cuda")


def _kernels(device: torch.device) -> Any:
    return import_module(f"cache_rank_kernels.pinned_ring.{implementation_for(device)}")
