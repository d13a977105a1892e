"""What tests of kernels share: both implementations of a kernel, and a quicker interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from cache_rank.kernels.attend import triton

_call, _called = InterpretedFunction.__call__, set()


def _call_quickly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function in Triton's interpreter.

    Each call patches all of triton.language, although each launch does, and modules of its own
    library stay patched: that is a third of the interpreter's time. Once for each module is enough.
    """
    if function.fn.__module__ in _called:
        return function.rewrite()(*args, **kwargs)
    _called.add(function.fn.__module__)
    return _call(function, *args, **kwargs)


InterpretedFunction.__call__ = _call_quickly  # type: ignore[method-assign]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what takes an `implementation` with each of the IMPLEMENTATIONS of its file."""
    both = getattr(metafunc.module, "IMPLEMENTATIONS", ())
    if both and "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", both, ids=["reference", "triton"])


@pytest.fixture
def few_splits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes its time for each program, also for one without work."""
    if device.type == "cpu":
        monkeypatch.setattr(triton, "LAUNCH", triton.LAUNCH._replace(most_splits=3))
