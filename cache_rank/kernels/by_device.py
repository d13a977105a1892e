"""One function for both kinds of device: Triton on a GPU, plain torch without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def by_device(
    reference: Callable[P, R],
) -> Callable[[Callable[[], Callable[..., R]]], Callable[P, R]]:
    """Make a function that has the signature of `reference`, and runs it or a Triton version of it.

    The decorated function imports the Triton version and returns it. It is called when tensors of a
    GPU come first: a process without a GPU never imports Triton. A Triton version may have more
    parameters, with defaults; tests/kernels/test_by_device.py compares the signatures.
    """

    def decorate(import_triton: Callable[[], Callable[..., R]]) -> Callable[P, R]:
        triton = functools.cache(import_triton)

        @functools.wraps(reference)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            chosen = triton() if is_on_gpu(*args) else reference
            return chosen(*args, **kwargs)

        return run

    return decorate


def is_on_gpu(*arguments: object) -> bool:
    """Whether an argument is a tensor of a GPU, or is a GPU."""
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.is_cuda:
            return True
        if isinstance(argument, torch.device):
            return argument.type == "cuda"
    return False
