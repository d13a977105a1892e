"""Runs one job of `profile_tpot` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from scripts.shared.machine import ProcessTree, memory_gib
from scripts.speed.jobs import Job
from scripts.speed.records import Measurement, explain_failure

POLL_SECONDS = 0.5
LOG_TAIL = 20_000


def run_job(
    job: Job,
    gpus: Sequence[str],
    out: Path,
    seconds: float,
    note: Callable[[Measurement], None],
) -> str:
    """Run a job, and end all of its processes.

    Args:
        job: what to run.
        gpus: the GPUs that it may use, as CUDA_VISIBLE_DEVICES names them.
        out: folder of the results; its log is written there.
        seconds: time that it may take.
        note: takes each measurement when it begins, and again when it ended.

    Returns:
        Why shapes that were not noted were not measured.
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    log, messages = (out / "logs" / f"{job.name}.{kind}" for kind in ("log", "jsonl"))
    messages.write_bytes(b"")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if job.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "scripts.speed.worker", str(messages)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    assert worker.stdin is not None
    worker.stdin.write(msgspec.json.encode(job))
    worker.stdin.close()
    tree, deadline = ProcessTree(worker.pid), time.monotonic() + seconds
    ready, line, most = False, b"", memory_gib(gpus)
    try:
        with messages.open("rb") as file:
            while True:
                # Looked at before the messages, so that the last of them is read.
                ended, late = worker.poll() is not None, time.monotonic() > deadline
                tree.look()
                used = memory_gib(gpus)
                most = [max(pair) for pair in zip(most, used, strict=True)]
                *lines, line = (line + file.read()).split(b"\n")  # the last one is not whole yet
                for whole in lines:
                    ready, measurement = True, msgspec.json.decode(whole, type=Measurement)
                    if measurement.ended:
                        measurement.memory_gib = most
                    else:
                        most = used
                    note(measurement)
                if ended or late:
                    break
                time.sleep(POLL_SECONDS)
    finally:
        tree.kill(wait_seconds=20)  # the next engine needs its memory
        worker.wait()
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL))
        tail = file.read().decode(errors="replace")
    return f"{explain_failure(tail, ready, late)}: see logs/{log.name}"
