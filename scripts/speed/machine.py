"""What `profile_tpot` asks of the machine: its GPUs, their memory over time, and its processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

SAMPLE_SECONDS = 0.25


def _nvml() -> Any:
    """NVIDIA's management library, or None without a driver."""
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception:  # the module is missing, or its own error: there is no driver
        return None
    return library


def visible_gpus() -> list[str]:
    """GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    library = _nvml()
    if library is None:
        return []
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    return [str(index) for index in range(library.nvmlDeviceGetCount())]


def describe(gpus: Sequence[str]) -> dict[str, Any]:
    """The machine, for the record."""
    library = _nvml()
    names = []
    if library is not None:
        names = [str(library.nvmlDeviceGetName(_handle(library, gpu))) for gpu in gpus]
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": names}


def _handle(library: Any, gpu: str) -> Any:
    if gpu.isdigit():
        return library.nvmlDeviceGetHandleByIndex(int(gpu))
    return library.nvmlDeviceGetHandleByUUID(gpu)


class MemoryWatch:
    """Samples the memory in use on every GPU, in the background."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = list(gpus)
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()
        library = _nvml() if self._gpus else None
        if library is not None:
            threading.Thread(target=self._sample, args=(library,), daemon=True).start()

    def peak_gib(self, gpus: Sequence[str], started: float, ended: float) -> list[float]:
        """Most memory in use on each GPU between two times of the epoch; empty if not sampled."""
        meanwhile = [used for when, used in self._samples if started <= when <= ended]
        return [max(used[gpu] for used in meanwhile) for gpu in gpus] if meanwhile else []

    def stop(self) -> None:
        self._stop.set()

    def _sample(self, library: Any) -> None:
        handles = {gpu: _handle(library, gpu) for gpu in self._gpus}
        while not self._stop.wait(SAMPLE_SECONDS):
            used = {
                gpu: library.nvmlDeviceGetMemoryInfo(handle).used / 2**30
                for gpu, handle in handles.items()
            }
            self._samples.append((time.time(), used))


class ProcessTree:
    """A process and all that it has started, also what outlives it."""

    def __init__(self, pid: int) -> None:
        self._seen: dict[int, psutil.Process] = {}
        self._root = psutil.Process(pid)

    def look(self) -> None:
        """Remember the children of the moment: those of a dead process cannot be found."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self._root.children(recursive=True):
                self._seen.setdefault(child.pid, child)

    def kill(self) -> None:
        """End all that is left, and wait for it: the next engine needs its memory."""
        self.look()
        children = [process for process in self._seen.values() if process.is_running()]
        for process in (self._root, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(children, timeout=20)
