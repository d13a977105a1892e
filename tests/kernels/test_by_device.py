"""An operation is the same function on every device."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import pytest
import torch

from cache_rank import kernels
from cache_rank.kernels.by_device import is_on_gpu

FOLDERS = [folder.name for folder in pkgutil.iter_modules(kernels.__path__) if folder.ispkg]
OPERATIONS = [
    (folder, name)
    for folder in FOLDERS
    for name, member in vars(import_module(f"cache_rank.kernels.{folder}")).items()
    if hasattr(member, "__wrapped__")
]


@pytest.mark.parametrize(("folder", "name"), OPERATIONS)
def test_the_triton_version_takes_what_the_reference_takes(folder: str, name: str) -> None:
    """In the same order, by the same names and with the same defaults; more has defaults."""
    reference = getattr(import_module(f"cache_rank.kernels.{folder}"), name).__wrapped__
    triton = getattr(import_module(f"cache_rank.kernels.{folder}.triton"), name)
    expected, found = inspect.signature(reference), inspect.signature(triton)
    parameters = [*found.parameters.values()]
    shared, more = parameters[: len(expected.parameters)], parameters[len(expected.parameters) :]
    assert shared == [*expected.parameters.values()]
    assert found.return_annotation == expected.return_annotation
    variadic = inspect.Parameter.VAR_KEYWORD
    assert all(one.default is not one.empty or one.kind is variadic for one in more)


def test_every_step_is_among_the_operations() -> None:
    assert {"append_step", "forecast_step", "score_codes", "select_step"} <= {
        name for _, name in OPERATIONS
    }


def test_tensors_of_a_gpu_and_gpus_choose_triton() -> None:
    """Whatever comes before them: memory of the host, or numbers."""
    on_cpu = torch.zeros(2)
    assert not is_on_gpu(3, on_cpu, torch.device("cpu"))
    assert is_on_gpu(3, torch.device("cuda"))
    if torch.cuda.is_available():
        assert is_on_gpu(on_cpu, on_cpu.cuda())
