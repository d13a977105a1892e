"""Small copies between host and device that do not stop the device's stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16


def upload(
    tensors: Sequence[Tensor], device: torch.device, into: Tensor | None = None
) -> list[Tensor]:
    """Copy host tensors to the device in one copy, on the current stream.

    A stream other than the current one that uses them must be recorded on the first.

    Args:
        into: uint8 memory of a GPU to copy to, in which tensors of the same shapes always lie at
            the same addresses. Without it, new memory is taken.
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


class Readback:
    """Copies a device tensor to the host, where it is read some time later."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def start(self, tensor: Tensor) -> None:
        """Copy a tensor on the current stream; it replaces one that was not read."""
        if not tensor.is_cuda:
            self._host = tensor.clone()
            return
        if self._host is None or self._host.shape != tensor.shape:
            self._host = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
            )
        self._host.copy_(tensor, non_blocking=True)
        self._done = self._done or torch.cuda.Event()
        self._done.record()

    def wait(self) -> Tensor | None:
        """Wait for the last tensor and return it, or None when there is none."""
        if self._done is not None:
            self._done.synchronize()
        return self._host

    def value(self) -> Tensor | None:
        """The last tensor, or None while it is under way or when there is none."""
        if self._done is not None and not self._done.query():
            return None
        return self._host
