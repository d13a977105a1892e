"""Integers between a host and its device by host memory that both see, one letter a step.

On a GPU neither side calls the driver for them: kernels take and leave letters, and graphs can hold
the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache_rank.operations import operations_for

LETTERS = 16
"""That a box holds: far more than the steps that a host is ahead of its device, or behind it."""


class Field(NamedTuple):
    """A place for so many numbers, and what stands where a step brings fewer."""

    size: int
    filler: int


class Outbox:
    """Integers that every step brings to the device, always to the same places.

    Kernels in captured graphs read them there.
    """

    def __init__(self, device: torch.device, **fields: Field) -> None:
        sizes = [field.size for field in fields.values()]
        self._box = _box(device, sum(sizes))
        self._letters = [_Letter(letter, fields) for letter in self._box]
        self._written = 0
        self._collected = torch.zeros(1, dtype=torch.int64, device=device)
        self._on_device = torch.empty(sum(sizes), dtype=torch.int64, device=device)
        self._views = dict(zip(fields, self._on_device.split(sizes), strict=True))
        self._first: dict[tuple[str, int], Tensor] = {}
        self._collect = operations_for(device).collect_letter
        self.write()
        self.collect()

    def __getitem__(self, name: str) -> Tensor:
        """A field on the device, (size,) int64."""
        return self._views[name]

    def first(self, name: str, count: int) -> Tensor:
        """The first numbers of a field on the device, (count,) int64."""
        key = name, count
        if key not in self._first:
            self._first[key] = self._views[name][:count]
        return self._first[key]

    def write(self, **numbers: Sequence[int]) -> None:
        """Write all fields of the next step; what was written LETTERS steps ago is collected."""
        self._letters[self._written % LETTERS].write(numbers)
        self._written += 1

    def collect(self) -> None:
        """Replace all fields by those of the next step, on the current stream."""
        self._collect(self._box, self._collected, self._on_device)


class Inbox:
    """Integers of the device that the host sees, as they were in the newest LETTERS steps."""

    def __init__(self, values: Tensor) -> None:
        """Bring a tensor, int64."""
        self._values = values
        self._box = _box(values.device, values.numel())
        self._newest = _box(values.device, 1)[0]
        self._letters = self._box.view(LETTERS, *values.shape).numpy()
        self._newest_seen = self._newest.numpy()
        operations = operations_for(values.device)
        self._post, self._signal = operations.post_letter, operations.signal

    def post(self, number: Tensor) -> None:
        """Bring the tensor as it is then, on the current stream.

        Args:
            number: (1,) int64 of the device: numbers grow; of 0, nothing is brought.
        """
        self._post(self._values, self._box, number)
        # A kernel of its own, so that the letter is there when its number is.
        self._signal(self._newest, 0, number)

    @property
    def newest(self) -> int:
        """The greatest number that has come; none before it is still to come."""
        return int(self._newest_seen[0])

    def letter(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """What came by a number, one of the newest LETTERS; it changes as more come."""
        letter: np.ndarray[Any, np.dtype[np.int64]] = self._letters[number % LETTERS]
        return letter


def _box(device: torch.device, width: int) -> Tensor:
    """Host memory for letters, (LETTERS, width) int64 zeros, which the device sees."""
    return torch.zeros((LETTERS, width), dtype=torch.int64, pin_memory=device.type == "cuda")


class _Letter:
    """Where the host writes the numbers of one step."""

    def __init__(self, letter: Tensor, fields: Mapping[str, Field]) -> None:
        # Writing to an array takes the host a fraction of building a tensor from a list.
        sizes = [field.size for field in fields.values()]
        arrays = np.split(letter.numpy(), np.cumsum(sizes)[:-1])
        self._fields = [
            (name, array, field.filler)
            for (name, field), array in zip(fields.items(), arrays, strict=True)
        ]
        self._written = dict.fromkeys(fields, 0)
        for _, array, filler in self._fields:
            array.fill(filler)

    def write(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """Write the numbers of a step, and fillers over what is left of an older one."""
        for name, array, filler in self._fields:
            new = numbers.get(name, ())
            count, before = len(new), self._written[name]
            array[:count] = new
            if count < before:
                array[count:before] = filler
            self._written[name] = count
