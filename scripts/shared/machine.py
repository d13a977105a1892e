"""The machine: its GPUs and who may use them, their memory over time, and processes to end."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import psutil

SAMPLE_SECONDS = 0.25


class NeedsGpus(Protocol):
    """A job that says how many GPUs it needs."""

    gpus: int


JobT = TypeVar("JobT", bound=NeedsGpus)


def _nvml() -> Any:
    """NVIDIA's management library, or None without a driver."""
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception:  # the module is missing, or its own error: there is no driver
        return None
    return library


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
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


class GpuPool:
    """GPUs, from which jobs take turns; one that is listed twice has two jobs at once."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._listed, self._free = list(gpus), list(gpus)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[list[str]]:
        """Wait for `count` different GPUs, in the order in which they were listed.

        Raises:
            ValueError: there are not so many.
        """
        if count > len(different := set(self._listed)):
            raise ValueError(f"needs {count} GPUs, and {len(different)} are listed")
        with self._changed:
            self._changed.wait_for(lambda: len(set(self._free)) >= count)
            taken = list(dict.fromkeys(self._free))[:count]
            for gpu in taken:
                self._free.remove(gpu)
        try:
            yield taken
        finally:
            with self._changed:
                self._free = sorted([*self._free, *taken], key=self._listed.index)
                self._changed.notify_all()


def run_jobs(
    jobs: Sequence[JobT],
    gpus: Sequence[str],
    run: Callable[[JobT, list[str]], None],
    fail: Callable[[JobT, Exception], None],
    stop: Callable[[], None],
    at_once: int | None = None,
) -> None:
    """Run jobs in threads, each on GPUs of its own.

    Args:
        jobs: what is run; the first ones are started first.
        gpus: GPUs that jobs may use; one that is listed twice takes two jobs at once.
        run: runs a job on the GPUs that it is given.
        fail: notes a job that raised an error, or needs more GPUs than there are.
        stop: makes the jobs that run end early. It is called when this thread is interrupted.
        at_once: most jobs at a time. By default there are as many as GPUs.
    """
    pool, stopping = GpuPool(gpus), threading.Event()

    def run_one(job: JobT) -> None:
        try:
            with pool.take(job.gpus) as taken:
                if not stopping.is_set():
                    run(job, taken)
        except Exception as error:  # a job must not take the others down
            if not stopping.is_set():  # it did not fail if it was stopped
                fail(job, error)

    with ThreadPoolExecutor(at_once or max(1, len(gpus))) as threads:
        try:
            for ended in wait([threads.submit(run_one, job) for job in jobs]).done:
                ended.result()
        except BaseException:
            stopping.set()
            threads.shutdown(wait=False, cancel_futures=True)
            stop()
            raise


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
        """The most memory in use on each GPU between two Unix times; empty if not sampled."""
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

    def kill(self, wait_seconds: float = 0.0) -> None:
        """End all that is left at once, and give it time to free its memory."""
        self.look()
        children = [process for process in self._seen.values() if process.is_running()]
        for process in (self._root, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if wait_seconds:
            psutil.wait_procs(children, timeout=wait_seconds)
