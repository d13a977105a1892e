"""Measure time per output token of several systems side by side, and write tables and plots.

    python -m scripts.profile_tpot --model qwen3-8b --shapes 8x32768 16x32768 \
        --systems floor dense fp8 tp2 quest cache-rank cache-rank:delta_capacity=64 --out results/
    python -m scripts.profile_tpot --experiment table2 | quest-time | tpot
    python -m scripts.profile_tpot --model bundled --shapes 2x600 --systems dense cache-rank \
        --sparse-threshold 300 --sparse-budget 64                # without a GPU
    python -m scripts.profile_tpot --render results/             # tables and plots again

Each system runs in a process of its own, with a deadline: one that fails is a line in the table,
and its log is in OUT/logs. Results are written as they come; `--resume` measures what is missing.
Weights are random numbers in the shapes of `model_shapes`; see profile_weights for which.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tqdm import tqdm

from scripts import profile_machine, profile_report
from scripts.profile_jobs import (
    EXPERIMENT_MODELS,
    EXPERIMENTS,
    FIRST_PORT,
    SYSTEMS,
    Job,
    Settings,
    Shape,
    Wish,
    make_job,
)
from scripts.profile_records import (
    Measurement,
    Message,
    Results,
    explain_failure,
    reduce_trace,
)

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
            results: to which measurements are added.
            out: folder that they are written to.
            gpus: as CUDA_VISIBLE_DEVICES names them.
            concurrent: jobs may run at the same time, on different GPUs.
            seconds: that one job may take.
        """
        self._results, self._jobs, self._out, self._seconds = results, jobs, out, seconds
        self._concurrent = concurrent
        self._gpus = list(gpus)
        self._free = list(gpus)
        self._running = 0
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._memory = profile_machine.MemoryWatch(gpus)
        shapes = sum(len(job.shapes) + bool(job.capacity) for job in jobs)
        self._bar = tqdm(total=shapes, unit="shape", dynamic_ncols=True)

    def run(self) -> None:
        """Run all jobs; one after the other, unless they may run concurrently."""
        threads = []
        try:
            for index, job in enumerate(self._jobs):
                if job.gpus > len(self._gpus):
                    self._fail(job, f"needs {job.gpus} GPUs, found {len(self._gpus)}", set())
                    continue
                gpus = self._take(job.gpus)
                thread = threading.Thread(target=self._run_and_give_back, args=(index, job, gpus))
                thread.start()
                threads.append(thread)
            while any(thread.is_alive() for thread in threads):
                time.sleep(POLL_SECONDS)
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()
            self._memory.stop()
            self._bar.close()

    def _take(self, count: int) -> list[str]:
        def can_start() -> bool:
            return len(self._free) >= count and (self._concurrent or self._running == 0)

        with self._changed:
            while not can_start():
                self._changed.wait(POLL_SECONDS)
            self._running += 1
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def _run_and_give_back(self, index: int, job: Job, gpus: list[str]) -> None:
        try:
            self._run_job(index, job, gpus)
        except Exception as error:  # a job must not take the others down
            self._fail(job, f"{type(error).__name__}: {error}", set())
        finally:
            with self._changed:
                self._running -= 1
                self._free = sorted([*self._free, *gpus], key=self._gpus.index)
                self._changed.notify_all()

    def _run_job(self, index: int, job: Job, gpus: list[str]) -> None:
        if job.gpus:
            job.engine.setdefault("port", FIRST_PORT + 200 * (index % 100))
        folder = self._out / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        (self._out / "traces").mkdir(exist_ok=True)
        log, lines = folder / f"{job.name}.log", folder / f"{job.name}.jsonl"
        lines.unlink(missing_ok=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if job.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        command = [sys.executable, "-m", "scripts.profile_tpot", "--worker", str(lines)]
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
        tree = profile_machine.ProcessTree(worker.pid)
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
            tree.kill()
            worker.wait()
        self._add_traces(job, measured)
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL))
            tail = file.read().decode(errors="replace")
        if self._stopping.is_set() and not ended:
            return
        reason = explain_failure(tail, ready, ran_out)
        self._fail(job, f"{reason}: see logs/{log.name}", {m.shape for m in measured})

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
            self._add([measurement])

    def _add_traces(self, job: Job, measured: list[Measurement]) -> None:
        if not job.trace:
            return
        for measurement in measured:
            if not measurement.failure:
                measurement.trace = reduce_trace(Path(job.trace), measurement.wire)
        self._add([])

    def _fail(self, job: Job, reason: str, measured: set[Shape]) -> None:
        """Make lines of the shapes that a job did not come to."""
        shapes = [shape for shape in job.shapes if shape not in measured]
        failed = [Measurement(job.model, job.system, shape, reason) for shape in shapes]
        if job.capacity and not any(shape.context == job.capacity for shape in measured):
            shape = Shape(1, job.capacity)
            failed.append(Measurement(job.model, job.system, shape, reason, capacity_search=True))
        self._add(failed)

    def _add(self, measurements: list[Measurement]) -> None:
        with self._changed:
            self._results.measurements += measurements
            profile_report.write_results(self._results, self._out)
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


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.profile_tpot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", nargs="+", help="a name in scripts/model_shapes, `bundled`, or a folder")
    add("--shapes", nargs="+", type=Shape.parse, default=[], help="BATCHxCONTEXT")
    add("--systems", nargs="+", help=f"NAME[:ARGUMENT=VALUE,...] of {', '.join(SYSTEMS)}")
    add("--experiment", choices=EXPERIMENTS, help="a preset of systems and shapes")
    add("--capacity", type=int, default=0, help="also find the largest batch of this context")
    add("--sparse-budget", type=int, default=2048)
    add("--sparse-threshold", type=int, default=4096)
    add("--repeats", type=int, default=3, help="windows of decode steps")
    add("--window", type=int, default=64, help="decode steps of a window")
    add("--skip-steps", type=int, help="steps before the first window; default: enough to settle")
    add("--seed", type=int, default=1)
    add("--memory-fraction", type=float, default=0.85, help="of a GPU, for weights and KV pool")
    add("--engine-args", type=json.loads, default={}, help="JSON object of engine arguments")
    add("--trace", action="store_true", help="trace both ranks; costs time in the step")
    add("--arrival", action="store_true", help="also time steps while one more prompt is shipped")
    add("--gpus", help="indices of the GPUs to use, separated by commas; default: all")
    add("--concurrent", action="store_true", help="run jobs on different GPUs at the same time")
    add("--worker-seconds", type=float, default=600.0, help="deadline of one system")
    add("--shape-seconds", type=float, default=300.0, help="deadline of one shape")
    add("--out", type=Path, default=Path("results"))
    add("--resume", action="store_true", help="keep what OUT holds and measure the rest")
    add("--dry-run", action="store_true", help="print the jobs and their engines' arguments")
    add("--render", type=Path, help="write the tables and plots of a folder again; needs no GPU")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.render and not options.worker and not options.experiment:
        if not options.systems or not (options.shapes or options.capacity):
            parser.error("give --experiment, or --systems with --shapes or --capacity")
        options.model = options.model or ["qwen3-8b"]
    return options


def make_wishes(options: argparse.Namespace) -> list[Wish]:
    """What to measure."""
    if options.experiment:
        models = options.model or EXPERIMENT_MODELS[options.experiment]
        return EXPERIMENTS[options.experiment](models)
    shapes = tuple(options.shapes)
    return [Wish(model, system, shapes) for model in options.model for system in options.systems]


def make_jobs(options: argparse.Namespace, results: Results) -> list[Job]:
    """The jobs, less what the results hold already.

    Raises:
        ValueError: an unknown model or system.
    """
    settings = Settings(
        sparse_budget=options.sparse_budget,
        sparse_threshold=options.sparse_threshold,
        repeats=options.repeats,
        window=options.window,
        skip_steps=options.skip_steps,
        seed=options.seed,
        shape_seconds=options.shape_seconds,
        capacity=options.capacity,
        memory_fraction=options.memory_fraction,
        engine=options.engine_args,
        trace=options.trace or options.experiment == "table2",
        arrival=options.arrival,
    )
    jobs = []
    for wish in make_wishes(options):
        job = make_job(wish, settings, options.out)
        job.shapes = [s for s in job.shapes if not results.find(job.model, job.system, s)]
        if any(
            m.capacity_search and m.tpot_ms and m.system == job.system and m.model == job.model
            for m in results.measurements
        ):
            job.capacity = 0
        if job.shapes or job.capacity:
            jobs.append(job)
    return jobs


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_options(argv)
    if options.worker:
        from scripts.profile_worker import run_worker

        run_worker(options.worker)
        return 0
    if options.render:
        results = profile_report.read_results(options.render / "results.json")
        _write_all(results, options.render)
        return 0

    results = Results()
    if options.resume and (options.out / "results.json").is_file():
        results = profile_report.read_results(options.out / "results.json")
        results.measurements = [m for m in results.measurements if m.tpot_ms]
    try:
        jobs = make_jobs(options, results)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gpus = options.gpus.split(",") if options.gpus else profile_machine.visible_gpus()
    results.experiment = options.experiment or ""
    results.command = ["python", "-m", "scripts.profile_tpot", *argv]
    results.machine = profile_machine.describe(gpus)
    names = {job.name for job in jobs}
    results.jobs = [job for job in results.jobs if job.name not in names] + jobs
    if options.dry_run:
        print(profile_report.describe_jobs(jobs))
        return 0
    # So that the processes of a run that is told to end are ended too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner = Runner(results, jobs, options.out, gpus, options.concurrent, options.worker_seconds)
    try:
        runner.run()
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
        return 130
    finally:
        _write_all(results, options.out)
    return 0


def _write_all(results: Results, out: Path) -> None:
    plots = profile_report.write_plots(results, out)
    for path in (*profile_report.write_results(results, out), *plots):
        print(path)
    if not plots:
        print("no plots: nothing was measured, or matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
