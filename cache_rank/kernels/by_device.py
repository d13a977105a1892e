"""One function for both kinds of device: Triton on a GPU, plain torch without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """Make a function that runs a reference or, on a GPU, its Triton version.

    That is the function of the same name in `triton.py` beside it. It is imported when tensors of a
    GPU come first: a process without a GPU never imports Triton. A Triton version may have more
    parameters, with defaults; tests/kernels/test_by_device.py compares the signatures.
    """
    beside = reference.__module__.removesuffix("reference") + "triton"

    @functools.cache
    def triton() -> Callable[P, R]:
        version: Callable[P, R] = getattr(import_module(beside), reference.__name__)
        return version

    @functools.wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        chosen = triton() if is_on_gpu(*args) else reference
        return chosen(*args, **kwargs)

    return run


def is_on_gpu(*arguments: object) -> bool:
    """Whether an argument, or one in a tuple of them, is a tensor of a GPU, or is a GPU."""
    for argument in arguments:
        if isinstance(argument, tuple) and is_on_gpu(*argument):
            return True
        if isinstance(argument, Tensor) and argument.is_cuda:
            return True
        if isinstance(argument, torch.device):
            return argument.type == "cuda"
    return False
