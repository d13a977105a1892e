"""Small copies between host and device that do not stop the device's stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 16

_STAGES = 4
"""More than the steps that a host is ahead of its device."""


def upload(
    tensors: Sequence[Tensor], device: torch.device, into: Tensor | None = None
) -> list[Tensor]:
    """Copy host tensors to the device in one copy, on the current stream.

    A stream other than the current one that uses them must be recorded on the first.

    Args:
        tensors: of any dtypes and shapes.
        device: where they are wanted.
        into: uint8 memory of a GPU to take, in which tensors of the same shapes always lie at the
            same places; new memory without it.
    """
    if device.type != "cuda":
        return [tensor.clone() for tensor in tensors]
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Torch takes pinned memory back only when the copies out of it are done.
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for start, tensor in zip(starts, tensors, strict=True):
        host[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    if into is None:
        packed = host.to(device, non_blocking=True)
    else:
        packed = into[:size].copy_(host, non_blocking=True)
    return [
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


class Field(NamedTuple):
    """A place for so many numbers, and what stands where a step brings fewer."""

    size: int
    filler: int


def split_fields(tensor: Tensor, fields: Mapping[str, Field]) -> dict[str, Tensor]:
    """The places of fields that fill a tensor together, by name: (size,) each."""
    places = tensor.split([field.size for field in fields.values()])
    return dict(zip(fields, places, strict=True))


class StepNumbers:
    """Integers that every step brings to the device, always to the same places.

    Kernels in captured graphs read them there.
    """

    def __init__(self, device: torch.device, **fields: Field) -> None:
        size = sum(field.size for field in fields.values())
        self._on_device = torch.empty(size, dtype=torch.int64, device=device)
        self._views = split_fields(self._on_device, fields)
        self._first: dict[tuple[str, int], Tensor] = {}
        if device.type == "cuda":
            self._stages = [
                StagedNumbers(torch.empty(size, dtype=torch.int64, pin_memory=True), fields)
                for _ in range(_STAGES)
            ]
        else:
            self._stages = [StagedNumbers(self._on_device, fields)]
        self._turn = 0
        self.upload()

    def __getitem__(self, name: str) -> Tensor:
        """A field on the device, (size,) int64."""
        return self._views[name]

    def first(self, name: str, count: int) -> Tensor:
        """The first numbers of a field on the device, (count,) int64."""
        key = name, count
        if key not in self._first:
            self._first[key] = self._views[name][:count]
        return self._first[key]

    def upload(self, **numbers: Sequence[int]) -> None:
        """Replace all fields, on the current stream, behind what reads the old ones."""
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % len(self._stages)
        if stage.uploaded is not None:
            stage.uploaded.synchronize()  # steps ago, so this never waits
        stage.write(numbers)
        if self._on_device.is_cuda:
            self._on_device.copy_(stage.tensor, non_blocking=True)
            stage.uploaded = torch.cuda.current_stream().record_event(stage.uploaded)


class StagedNumbers:
    """The numbers of a step in host memory, which the device gets a copy of."""

    def __init__(self, tensor: Tensor, fields: Mapping[str, Field]) -> None:
        self.tensor = tensor
        self.uploaded: torch.cuda.Event | None = None
        # Writing to an array takes the host a fraction of building a tensor from a list.
        self._fields = [
            (name, place.numpy(), fields[name].filler)
            for name, place in split_fields(tensor, fields).items()
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


class Readback:
    """Device tensors to the host, read some time after they were computed."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def start(self, tensor: Tensor) -> None:
        """Copy a tensor on the current stream, in the place of one that was not read."""
        if not tensor.is_cuda:
            self._host = tensor.clone()
            return
        if self._host is None or self._host.shape != tensor.shape:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = self._done or torch.cuda.Event()
        self._done.record()

    def wait(self) -> Tensor | None:
        """The last tensor, when it has come, or None when there is none."""
        if self._done is not None:
            self._done.synchronize()
        return self._host

    def value(self) -> Tensor | None:
        """The last tensor, or None while it is under way or when there is none."""
        if self._done is not None and not self._done.query():
            return None
        return self._host
