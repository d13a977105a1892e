"""What all tests need.

Without a GPU, Triton kernels run in Triton's interpreter, in this process only.
"""

import importlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from scripts.shared.serving import stop_on_sigterm

stop_on_sigterm()

if not torch.cuda.is_available():
    # Triton reads the variable when a kernel is defined, its own library included. Servers that
    # tests start must not inherit it.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # the interpreter imports it later
    for kernel in sorted((Path(__file__).parents[1] / "kernels").glob("*/triton.py")):
        importlib.import_module(f"cache_rank_kernels.{kernel.parent.name}.triton")
    del os.environ["TRITON_INTERPRET"]


settings.register_profile("default", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("default")  # `--hypothesis-profile thorough` takes the other


@pytest.fixture
def device() -> torch.device:
    """The device that kernels run on: this machine's GPU, or the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
