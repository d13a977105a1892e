"""The machine: its GPUs and who may use them, their memory, and processes to end."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import pynvml

VERSIONS = ("sglang", "torch")
"""The packages whose versions are recorded."""


class NeedsGpus(Protocol):
    """A job that says how many GPUs it needs."""

    @property
    def gpus(self) -> int: ...


JobT = TypeVar("JobT", bound=NeedsGpus)


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


def kill_session(leader: int, wait_seconds: float = 0.0) -> None:
    """End all processes of a session at once, and give them time to free their memory.

    Those that have outlived their leader are found as well.
    """
    members = [one for one in psutil.process_iter() if _session_of(one.pid) == leader]
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    others = [process for process in members if process.pid != leader]
    psutil.wait_procs(others, timeout=wait_seconds)


def _session_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return os.getsid(pid)
    return None
