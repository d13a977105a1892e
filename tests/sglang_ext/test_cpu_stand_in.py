"""Machines without a GPU: what stands in for CUDA kernels, and what imports must not touch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_ext
from sglang_ext import cpu

ROOT = Path(sglang_ext.__file__).parent.parent


def run_without_gpu(program: str) -> Any:
    """What a program prints as JSON, run from the repository root on a machine without a GPU."""
    completed = subprocess.run(
        [sys.executable, "-c", f"import json\n{program}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


WITH_THE_PACKAGE = """
import os, sys
os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
import sglang_ext
heavy = [name for name in sys.modules if name.split(".")[0] in ("sglang", "torch")]

import sgl_kernel
import sgl_kernel.flash_attn
from sgl_kernel import fused_add_rmsnorm
from sgl_kernel.flash_attn import flash_attn_with_kvcache
from sgl_kernel.quantization.gguf import ggml_dequantize

errors = {}
for call in (
    lambda: fused_add_rmsnorm(1, eps=2),
    lambda: sgl_kernel.gelu_and_mul(),
    lambda: flash_attn_with_kvcache(),
    lambda: ggml_dequantize(),
    lambda: sgl_kernel.ScalarType.uint(4, None),
):
    try:
        call()
    except RuntimeError as error:
        name, _, reason = str(error).partition(" ")
        errors[name] = reason
hidden = [name for name in ("__version__", "__path_hooks__") if hasattr(sgl_kernel, name)]
print(json.dumps([os.environ["SGLANG_USE_CPU_ENGINE"], heavy, hidden, errors]))
"""


def test_the_package_stands_in_for_kernels_and_imports_nothing_of_sglang() -> None:
    engine, heavy, hidden, errors = run_without_gpu(WITH_THE_PACKAGE)
    assert (engine, heavy, hidden) == ("1", [], [])
    assert errors.keys() == {
        "sgl_kernel.fused_add_rmsnorm",
        "sgl_kernel.gelu_and_mul",
        "sgl_kernel.flash_attn.flash_attn_with_kvcache",
        "sgl_kernel.quantization.gguf.ggml_dequantize",
        "sgl_kernel.ScalarType.uint",
    }
    assert all("no NVIDIA driver" in reason for reason in errors.values())


WITHOUT_THE_PACKAGE = """
import sys
import torch
import cache_rank.process
from cache_rank.kernels.append import load_tokens
from cache_rank.kernels.rows import Shipment
pool = torch.zeros((1, 1, 1, 4, 2))
tokens, page = torch.ones((2, 1, 3, 1, 2)), torch.zeros(1, dtype=torch.int32)
load_tokens(Shipment.of_one(tokens, page), pool, pool.clone())
imported = sorted({name.split(".")[0] for name in sys.modules})

import kernels
import cache_rank.kernels.scatter.reference as ours
found = [kernels.__file__, hasattr(kernels, "get_kernel"), ours.__file__]
print(json.dumps([imported, found]))
"""


def test_the_cache_rank_imports_nothing_of_sglang_and_kernels_is_hugging_faces_package() -> None:
    imported, (theirs, is_theirs, ours) = run_without_gpu(WITHOUT_THE_PACKAGE)
    ours_and_theirs = {"sglang", "sglang_ext", "sgl_kernel", "triton", "cache_rank"}
    assert ours_and_theirs & {*imported} == {"cache_rank"}
    assert Path(theirs).parent.parent.name == "site-packages"
    assert is_theirs
    assert Path(ours).parts[-2:] == ("scatter", "reference.py")


# In this process.


@pytest.fixture
def bare_meta_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before this package was imported."""
    others = [finder for finder in sys.meta_path if not isinstance(finder, cpu._StandIn)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


@pytest.mark.usefixtures("bare_meta_path")
def test_a_machine_with_a_gpu_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_gpu", lambda: True)
    cpu.install_stand_in()
    assert not [finder for finder in sys.meta_path if isinstance(finder, cpu._StandIn)]
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ


def test_hidden_devices_count_as_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda name: name)  # a driver
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not cpu.has_gpu.__wrapped__()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert cpu.has_gpu.__wrapped__()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cpu.has_gpu.__wrapped__()


@pytest.mark.parametrize("threads", [1, 2])
def test_processes_are_forked_by_one_that_has_no_other_thread(threads: int) -> None:
    program = (
        "import multiprocessing, threading\n"
        "from sglang_ext import cpu\n"
        "multiprocessing.set_start_method('spawn')\n"
        f"if {threads} > 1: threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "cpu.fork_processes()\n"
        "print(json.dumps(multiprocessing.get_start_method()))"
    )
    assert run_without_gpu(program) == ("fork" if threads == 1 else "spawn")
