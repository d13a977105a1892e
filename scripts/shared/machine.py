"""The machine: its GPUs, their memory, and processes to end."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml

VERSIONS = ("sglang", "torch")
"""The packages whose versions are recorded."""


@functools.cache
def _has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _handles(gpus: Sequence[str]) -> list[Any]:
    """NVIDIA's handles of GPUs, which have an index or the name that their maker gave them."""
    if not _has_driver():
        return []
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
        if gpu.isdigit()
        else pynvml.nvmlDeviceGetHandleByUUID(gpu)
        for gpu in gpus
    ]


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    if not _has_driver():
        return []
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]


def describe(gpus: Sequence[str]) -> dict[str, Any]:
    """The machine and the versions that matter, for the record."""
    names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in _handles(gpus)]
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    versions["commit"] = _commit()
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": names, **versions}


def _commit() -> str:
    """The commit of this checkout, marked if files were changed since; empty outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError):
        here = Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip()
    return ""


def memory_gib(gpus: Sequence[str]) -> list[float]:
    """The memory in use on each GPU; empty without a driver."""
    return [pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30 for handle in _handles(gpus)]


def kill_session(leader: int, wait_seconds: float = 0.0) -> None:
    """End all processes of a session at once, and give them time to free their memory.

    Those that have outlived their leader are found as well.
    """
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended meanwhile
            if os.getsid(process.pid) == leader:
                process.kill()
                killed.append(process)
    others = [process for process in killed if process.pid != leader]
    psutil.wait_procs(others, timeout=wait_seconds)
