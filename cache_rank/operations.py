"""Which implementation of the kernels of `mosaickv` is for a device."""

from __future__ import annotations

import torch


def implementation_for(device: torch.device) -> str:
    """The module of a kernel's folder that is for tensors on `device`."""
    return "triton" if device.type == "cuda" else "reference"
