"""Kernels compile, without a GPU, for one: its compiler refuses some of what interpreters run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "cache_rank/kernels"
TESTS = [
    *(path for path in sorted(HERE.glob("test_*.py")) if path != Path(__file__)),
    *sorted((HERE.parent / "cache_rank").glob("*_residency.py")),
    *(
        HERE.parent / f"cache_rank/{name}.py"
        for name in ("test_attending", "test_mosaickv_kernels")
    ),
]

PARTS_OF_OTHERS = {"nibbles", "wire"}
"""Folders without a kernel of their own."""


@pytest.mark.thorough  # two minutes of a core, many more beside servers: `.ci/run` runs it alone
@pytest.mark.timeout(1000)
@pytest.mark.skipif(torch.cuda.is_available(), reason="all kernels are compiled and run")
def test_kernels_compile_for_hopper() -> None:
    path = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))
    # What tests compare is not what a kernel would give: to show how it differs takes hours.
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--assert=plain", "-p", "compiling"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", *map(str, TESTS)],
        env=os.environ | {"PYTHONPATH": path, "KERNELS_ARE_COMPILED": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-20_000:]
    compiled = re.findall(r"^compiled .*$", run.stdout, re.MULTILINE)
    folders = set(re.findall(r"cache_rank\.kernels\.(\w+)\.", " ".join(compiled)))
    assert folders == {each.parent.name for each in KERNELS.glob("*/triton.py")} - PARTS_OF_OTHERS
