"""GPUs are shared out among jobs, and sessions are ended whole."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from scripts.shared.machine import GpuPool, kill_session, run_jobs


def test_gpus_are_shared_out() -> None:
    pool = GpuPool(["0", "1", "0"])
    with pool.take(2) as pair:
        assert pair == ["0", "1"]
        with pool.take(1) as one:
            assert one == ["0"]
            waited = threading.Event()

            def wait() -> None:
                with pool.take(1):
                    waited.set()

            thread = threading.Thread(target=wait)
            thread.start()
            assert not waited.wait(0.05)
        thread.join(10)
        assert waited.is_set()
    with pool.take(2) as pair:
        assert pair == ["0", "1"]


def test_too_few_gpus_are_an_error_and_not_a_wait() -> None:
    with pytest.raises(ValueError, match="needs 2 GPUs"), GpuPool(["0", "0"]).take(2):
        pass


@dataclass
class Job:
    name: str
    gpus: int


def test_jobs_run_on_gpus_of_their_own_and_a_failure_is_noted() -> None:
    taken: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    together = threading.Barrier(2)

    def run(job: Job, gpus: list[str]) -> None:
        taken[job.name] = gpus
        if job.name == "broken":
            raise RuntimeError("no memory")
        together.wait(10)

    def fail(job: Job, error: Exception) -> None:
        failed[job.name] = str(error)

    jobs = [Job("broken", 1), Job("one", 1), Job("other", 1), Job("large", 3)]
    run_jobs(jobs, ["0", "1"], run, fail, lambda: None)
    assert sorted(taken["one"] + taken["other"]) == ["0", "1"]
    assert failed == {"broken": "no memory", "large": "needs 3 GPUs, and 2 are listed"}


def test_processes_that_outlive_their_leader_end_with_its_session() -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        leader.wait()
        os.kill(child, 0)
        kill_session(leader.pid, wait_seconds=10)
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
