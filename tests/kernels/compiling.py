"""A pytest plugin: what tests launch is compiled for Hopper, without a GPU, and nothing runs.

So tests fail; only what a compiler refuses counts, or what takes more memory than a program may.
`test_compiled.py` runs tests with it.
"""

from __future__ import annotations

import re
import subprocess
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

LEAST_HEAD_DIM = 64
"""Some tests of the interpreter have smaller heads than any model: these may be refused."""

MOST_SHARED = 227 * 1024
"""Bytes that programs on a multiprocessor of a Hopper GPU share."""

MOST_SPILLED = 1024
"""Bytes of a thread that registers do not hold. With more a compiler has given up allocating them:
such a kernel keeps all in memory, and one read what was not its own."""


class Hopper:
    """What Triton asks a driver before a kernel is launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


driver.set_active(Hopper())
_compile = JITFunction.run
_compiled: set[tuple[str, ...]] = set()
_refused: list[str] = []


def compile_once(
    kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> None:
    if "INTERPRETED" in kwargs:
        kwargs["INTERPRETED"] = False
    head_dim = kwargs.get("HEAD_DIM", getattr(kwargs.get("LAYOUT"), "head_dim", LEAST_HEAD_DIM))
    functions = [each for each in kwargs.values() if isinstance(each, JITFunction)]
    names = [f"{each.fn.__module__}.{each.__name__}" for each in (kernel, *functions)]
    differs = ["small heads"]  # of any dtype: they show little
    if head_dim >= LEAST_HEAD_DIM:
        differs = [str(each.dtype) for each in args if isinstance(each, torch.Tensor)]
    variant = (*names, *differs)
    if variant in _compiled:
        return
    try:
        _check_memory(_compile(kernel, *args, grid=grid, warmup=True, **kwargs))
        _compiled.add(variant)
    except Exception:
        if head_dim >= LEAST_HEAD_DIM:
            sizes = {name: value for name, value in kwargs.items() if name.isupper()}
            _refused.append(f"{variant} with {sizes}\n{traceback.format_exc()}")


def _check_memory(compiled: Any) -> None:
    """Refuse what would not start on a GPU, or has its numbers in memory."""
    assert compiled.metadata.shared <= MOST_SHARED, f"{compiled.metadata.shared} bytes are shared"
    with TemporaryDirectory() as folder:
        binary = Path(folder, "cubin")
        binary.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = max(map(int, re.findall(r"STACK:(\d+)", usage)))
    assert spilled <= MOST_SPILLED, f"registers lack {spilled} bytes a thread"


JITFunction.run = compile_once  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = 1 if _refused else 0


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for text in _refused:
        terminalreporter.write_line(text)
    for variant in sorted(_compiled):
        terminalreporter.write_line(f"compiled {' '.join(variant)}")
