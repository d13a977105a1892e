"""The one place that knows about machines without a GPU.

SGLang imports `sgl_kernel` on every path, and calls it on none that the CPU engine takes. Its wheel
needs an NVIDIA driver, and there is none for CPUs. Without a driver, a stand-in takes its place
before SGLang is imported, and a call that would need a kernel fails with the kernel's name.

No release up to 0.5.23 does without: its CPU engine imports `sgl_kernel`, and without that engine,
rotary embeddings are imported from vLLM.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import psutil


@functools.cache
def has_gpu() -> bool:
    """Whether an NVIDIA driver can be loaded; CUDA is not initialized."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _Unavailable(type):
    """Stands for a name of `sgl_kernel`: it can be imported, and not called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unavailable(f"{cls.__name__}.{name}")

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{cls.__name__} is a CUDA kernel and this machine has no NVIDIA driver: "
            "choose an option that runs on CPU"
        )


def _unavailable(name: str) -> _Unavailable:
    return _Unavailable(name, (), {})


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel` and every module below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "sgl_kernel" or fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def missing(name: str) -> _Unavailable:
            if name.startswith("__"):
                raise AttributeError(name)
            return _unavailable(f"{module.__name__}.{name}")

        module.__getattr__ = missing  # type: ignore[method-assign]


def install_stand_in() -> None:
    """Make SGLang importable without a GPU; with one, or a second time, do nothing."""
    if has_gpu() or any(isinstance(finder, _StandIn) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _StandIn())
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # The two ranks share the cores; threads that spin for a core the other rank has cost most.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))


def fork_processes(*_: Any) -> None:
    """Let SGLang fork its processes, without a GPU, after it has chosen to spawn them.

    Each imports SGLang otherwise, which is most of what a start takes on a CPU. A process with
    threads, as one that has computed with torch, is not forked: its child would wait for them.
    """
    if not has_gpu() and psutil.Process().num_threads() == 1:
        multiprocessing.set_start_method("fork", force=True)


def name_the_device() -> None:
    """Let torch name the CPU, without a GPU, where it is asked for the module of the device.

    From 2.14 on a build for CUDA names CUDA with or without a driver, and SGLang, when it releases
    memory, asks that module to synchronize.
    """
    import torch

    if has_gpu():
        return
    module_of = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        return module_of("cpu" if device is None else device)

    torch.get_device_module = functools.cache(get_device_module)
