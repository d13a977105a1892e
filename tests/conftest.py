"""Set up what every test needs.

Without a GPU, Triton kernels run in Triton's interpreter, in this process only, and servers are
copies of a process that has imported SGLang. Hypothesis has two profiles. Tests that start servers
come first. Tests of kernels need no package but cache_rank, so that nothing else is imported before
a test asks for it.
"""

import functools
import importlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import warm_start
from hypothesis import settings

from scripts.shared import serving

# A shell lets what it runs in the background ignore interrupts, and so would servers of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available() and "KERNELS_ARE_COMPILED" not in os.environ:
    # Triton reads the variable when a kernel is defined, its own library included. Servers that
    # tests start must not inherit it.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # the interpreter imports it later
    for kernel in sorted((Path(__file__).parents[1] / "cache_rank/kernels").glob("*/triton.py")):
        importlib.import_module(f"cache_rank.kernels.{kernel.parent.name}.triton")
    importlib.import_module("scripts.baselines.kernels")
    del os.environ["TRITON_INTERPRET"]
    serving.start_process = functools.partial(warm_start.start, serving.start_process)


settings.register_profile("default", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=30, deadline=None, derandomize=True)
settings.load_profile("default")  # `--hypothesis-profile thorough` takes the other


LONGEST_FIRST = [
    "test_sglang_interface",  # takes seconds, and says what a new release of SGLang has moved
    "test_dense_equivalence",  # with others that take plain SGLang as well
    "test_drafts",  # with others of drafts
    "test_failure",
    "test_verified_elsewhere",
    "test_server",  # with others of the bundled model
    "test_weight_updates",
    "test_disaggregation",
    "test_compiled",  # starts none, and takes as long
    "test_language_model",
    "test_random_trace",
    "test_synchronous_reference",
    "test_formats",
]
"""After the first, these files start servers, from the longest group to the shortest."""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Handle signals as before after a test: what tests start inherits those that are ignored."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arguments of a server set up logging and the environment: leave them as they were."""
    level = logging.root.level
    monkeypatch.setattr(logging.root, "handlers", [])
    with patch.dict(os.environ):
        yield
    logging.root.setLevel(level)


@pytest.fixture
def device() -> torch.device:
    """Kernels run on this machine's GPU, or on the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def language_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, which is fetched where it is missing."""
    from scripts.fetch_model import FetchError, fetch
    from scripts.shared.models import fetched_folder

    folder = fetched_folder("smollm2")
    try:
        fetch("smollm2", folder)
    except FetchError as error:
        pytest.fail(str(error), pytrace=False)
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are, or has more ranks than can be on them."""
    if marker := item.get_closest_marker("gpu"):
        (wanted,) = marker.args or (1,)
        if marker.kwargs.get("ranks"):
            from sglang_ext.flags import SHARE_GPU_VARIABLE

            wanted = 1 if os.environ.get(SHARE_GPU_VARIABLE) == "1" else wanted
        if torch.cuda.device_count() < wanted:
            pytest.skip(f"needs {wanted} GPU{'s' * (wanted > 1)}")


def pytest_xdist_auto_num_workers() -> int:
    """Run tests in one process on a machine with GPUs, else in one for each core, up to four.

    Servers that share a GPU would take its memory from each other. On a CPU a server takes 3 GB.
    """
    return 1 if torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that start servers, the longest groups first."""
    items.sort(key=lambda item: _place(item.path))


def _place(file: Path) -> int:
    return LONGEST_FIRST.index(file.stem) if file.stem in LONGEST_FIRST else len(LONGEST_FIRST)
