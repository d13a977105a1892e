"""Kernels that are launched before the kernel ahead of them has ended.

From compute capability 9.0 on, a GPU starts a dependent kernel once every program of the kernel
ahead has begun, and the dependent one waits for its results by itself. So its launch costs nothing,
nor what it does before it waits. Every program of it has to wait, also one that has nothing to do:
otherwise a third kernel could start before the first has ended.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def dependent_launch(tensor: Tensor) -> dict[str, Any]:
    """Options of the launch of a kernel with the parameter DEPENDENT, on the GPU of a tensor."""
    can = tensor.is_cuda and _has_dependent_launches(tensor.device)
    return {"DEPENDENT": True, "launch_pdl": True} if can else {"DEPENDENT": False}


def has_dependents(tensor: Tensor) -> bool:
    """Whether kernels behind one on the GPU of a tensor are launched as dependents."""
    return bool(dependent_launch(tensor)["DEPENDENT"])


@functools.cache
def _has_dependent_launches(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_dependents_start(DEPENDENT: tl.constexpr):
    """Let the kernel behind this one be launched, as far as this program is concerned."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_kernel_ahead(DEPENDENT: tl.constexpr):
    """Wait until the kernel ahead has ended, and see what it has written."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
