"""Runs the jobs of `profile_tpot` in processes of their own, and collects what they measure."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tqdm import tqdm

from scripts.shared.machine import MemoryWatch, ProcessTree, run_jobs
from scripts.speed.jobs import FIRST_PORT, Job, Shape
from scripts.speed.records import Measurement, Message, Results, explain_failure, reduce_trace
from scripts.speed.report import write_results

POLL_SECONDS = 0.5
LOG_TAIL = 20_000


class Runner:
    """Runs jobs on the GPUs of this machine and collects what they measure."""

    def __init__(
        self,
        results: Results,
        jobs: Sequence[Job],
        out: Path,
        gpus: Sequence[str],
        concurrent: bool,
        seconds: float,
    ) -> None:
        """Prepare.

        Args:
            results: measurements are added to them.
            jobs: what to run.
            out: folder that results are written to.
            gpus: GPUs as CUDA_VISIBLE_DEVICES names them.
            concurrent: jobs may run at the same time, on different GPUs.
            seconds: time that one job may take.
        """
        self._results, self._jobs, self._out, self._seconds = results, jobs, out, seconds
        self._gpus, self._at_once = gpus, None if concurrent else 1
        self._changed = threading.Lock()
        self._stopping = threading.Event()
        self._memory = MemoryWatch(gpus)
        shapes = sum(len(job.shapes) + bool(job.capacity) for job in jobs)
        self._bar = tqdm(total=shapes, unit="shape", dynamic_ncols=True)

    def run(self) -> None:
        """Run all jobs; one after the other, unless they may run concurrently."""
        try:
            run_jobs(
                self._jobs,
                self._gpus,
                self._run_job,
                lambda job, error: self._fail(job, f"{type(error).__name__}: {error}", []),
                self._stopping.set,
                self._at_once,
            )
        finally:
            self._memory.stop()
            self._bar.close()

    def _run_job(self, job: Job, gpus: list[str]) -> None:
        if not job.cache_step:
            job.engine.setdefault("port", FIRST_PORT + 200 * (self._jobs.index(job) % 100))
        folder = self._out / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        (self._out / "traces").mkdir(exist_ok=True)
        log, lines = folder / f"{job.name}.log", folder / f"{job.name}.jsonl"
        lines.unlink(missing_ok=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if job.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        command = [sys.executable, "-m", "scripts.speed.worker", str(lines)]
        self._bar.set_description(f"starting {job.model} {job.system}")
        with log.open("wb") as output:
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode(job))
        worker.stdin.close()
        tree = ProcessTree(worker.pid)
        reader = _Reader(lines)
        deadline = time.monotonic() + self._seconds
        measured: list[Measurement] = []
        ran_out = ready = False
        try:
            while True:
                ended = worker.poll() is not None
                tree.look()
                for message in reader.read():
                    ready = True
                    self._note(job, gpus, message, measured)
                ran_out = time.monotonic() > deadline
                if ended or ran_out or self._stopping.is_set():
                    break
                time.sleep(POLL_SECONDS)
        finally:
            tree.kill(wait_seconds=20)  # the next engine needs its memory
            worker.wait()
        self._add_traces(job, measured)
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL))
            tail = file.read().decode(errors="replace")
        if self._stopping.is_set() and not ended:
            return
        reason = explain_failure(tail, ready, ran_out)
        self._fail(job, f"{reason}: see logs/{log.name}", measured)

    def _note(self, job: Job, gpus: list[str], message: Message, seen: list[Measurement]) -> None:
        if message.kind == "ready":
            self._results.machine |= {k: message.machine[k] for k in ("sglang", "torch")}
        elif message.kind == "begin":
            self._bar.set_description(f"{job.model} {job.system} {message.shape}")
        elif message.measurement is not None:
            measurement = message.measurement
            measurement.memory_gib = self._memory.peak_gib(
                gpus, measurement.started, measurement.ended
            )
            seen.append(measurement)
            if len(seen) > len(job.shapes) and not measurement.capacity_search:
                self._bar.total += 1  # a batch that the search for the largest one gave up
            self._add([measurement])

    def _add_traces(self, job: Job, measured: list[Measurement]) -> None:
        if not job.trace:
            return
        for measurement in measured:
            if not measurement.failure:
                measurement.trace = reduce_trace(Path(job.trace), measurement.wire)
        self._add([])

    def _fail(self, job: Job, reason: str, measured: list[Measurement]) -> None:
        """Make lines of the shapes that a job did not come to."""
        seen = {measurement.shape for measurement in measured}
        shapes = [shape for shape in job.shapes if shape not in seen]
        failed = [Measurement(job.model, job.system, shape, reason) for shape in shapes]
        if job.capacity and not any(measurement.capacity_search for measurement in measured):
            shape = Shape(1, job.capacity)
            failed.append(Measurement(job.model, job.system, shape, reason, capacity_search=True))
        self._add(failed)

    def _add(self, measurements: list[Measurement]) -> None:
        with self._changed:
            self._results.measurements += measurements
            write_results(self._results, self._out)
        self._bar.update(len(measurements))


class _Reader:
    """Whole lines of a file that another process is writing."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def read(self) -> list[Message]:
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        return [msgspec.json.decode(line, type=Message) for line in whole.splitlines()]
