"""Runs what `profile_tpot` is asked for, and writes what it measured."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from scripts.shared import machine
from scripts.shared.serving import stop_on_sigterm
from scripts.speed import report
from scripts.speed.experiments import EXPERIMENTS
from scripts.speed.jobs import PORTS, Job, Settings, Shape, Wish, divide, make_job
from scripts.speed.records import Measurement, Results
from scripts.speed.runner import run_job
from scripts.speed.trace import reduce_trace

FIRST_PORT = 30000
"""Each job has PORTS from this on for itself."""


def make_jobs(options: Namespace, results: Results) -> list[Job]:
    """The jobs, less what the results hold already.

    Raises:
        ValueError: an unknown model or system, or a batch that its servers cannot share.
    """
    if options.experiment:
        preset = EXPERIMENTS[options.experiment]
        wishes = preset(options.model) if options.model else preset()
    else:
        shapes = tuple(options.shapes)
        wishes = [
            Wish(model, system, shapes) for model in options.model for system in options.systems
        ]
    settings = Settings(**{name: getattr(options, name) for name in Settings.__struct_fields__})
    jobs = [make_job(wish, settings, options.out) for wish in wishes]
    for job in jobs:
        measured = [m for m in results.of(job) if m.tpot_ms]
        job.shapes = [shape for shape in job.shapes if shape not in {m.shape for m in measured}]
        if any(m.capacity_search for m in measured):
            job.capacity = 0
    jobs = [job for job in jobs if job.shapes or job.capacity]
    for index, job in enumerate(jobs):
        if not job.cache_step:
            job.engine.setdefault("port", FIRST_PORT + PORTS * (index % 100))
        if job.servers > 1:
            divide(job)  # or say why it cannot be
    return jobs


def run_all(results: Results, jobs: Sequence[Job], gpus: Sequence[str], options: Namespace) -> None:
    """Run jobs, and add what they measure to the results, which are written as they come."""
    stopping, changed = threading.Event(), threading.Lock()
    shapes = sum(len(job.shapes) + bool(job.capacity) for job in jobs)
    bar = tqdm(total=shapes, unit="shape", dynamic_ncols=True)

    def add(measurements: list[Measurement]) -> None:
        with changed:
            results.measurements += measurements
            report.write_results(results, options.out)
            bar.update(len(measurements))

    def run(job: Job, taken: list[str]) -> None:
        measured = []

        def note(measurement: Measurement) -> None:
            if measurement.ended:
                measured.append(measurement)
                add([measurement])
            else:
                bar.set_description(f"{job.model} {job.system} {measurement.shape}")

        bar.set_description(f"starting {job.model} {job.system}")
        reason = run_job(job, taken, options.out, options.worker_seconds, stopping, note)
        for measurement in measured if job.trace else ():
            if not measurement.failure:
                measurement.trace = reduce_trace(Path(job.trace), measurement.wire)
        add([] if stopping.is_set() else unmeasured(job, results, reason))

    def fail(job: Job, error: Exception) -> None:
        add(unmeasured(job, results, f"{type(error).__name__}: {error}"))

    with bar:
        machine.run_jobs(jobs, gpus, run, fail, stopping.set, None if options.concurrent else 1)


def unmeasured(job: Job, results: Results, reason: str) -> list[Measurement]:
    """The shapes that a job did not come to, with the reason."""
    seen = results.of(job)
    shapes = [shape for shape in job.shapes if shape not in {m.shape for m in seen}]
    lines = [Measurement(job.model, job.system, shape, reason) for shape in shapes]
    if job.capacity and not any(m.capacity_search for m in seen):
        lines.append(Measurement(job.model, job.system, Shape(1, job.capacity), reason, True))
    return lines


def profile(options: Namespace, argv: Sequence[str]) -> int:
    """Measure what OUT lacks, unless told to render or to describe only; the exit status.

    Raises:
        ValueError: an unknown model or system.
    """
    if options.render:
        write_files(report.read_results(options.render / "results.json"), options.render)
        return 0
    results, earlier = Results(), options.out / "results.json"
    if options.resume and earlier.is_file():
        results = report.read_results(earlier)
        results.measurements = [m for m in results.measurements if m.tpot_ms]
    jobs = make_jobs(options, results)
    if options.dry_run:
        print(report.describe_jobs(jobs))
        return 0
    gpus = options.gpus.split(",") if options.gpus else machine.visible_gpus()
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "torch")}
    names = {job.name for job in jobs}
    results.experiment = options.experiment or ""
    results.command = ["python", "-m", "scripts.profile_tpot", *argv]
    results.machine = machine.describe(gpus) | versions
    results.jobs = [job for job in results.jobs if job.name not in names] + jobs
    stop_on_sigterm()
    try:
        run_all(results, jobs, gpus, options)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
        return 130
    finally:
        write_files(results, options.out)
    return 0


def write_files(results: Results, out: Path) -> None:
    """Write tables and plots, and say which files they are."""
    plots = report.write_plots(results, out)
    for path in (*report.write_results(results, out), *plots):
        print(path)
    if not plots:
        print("no plots: nothing was measured, or matplotlib is not installed", file=sys.stderr)
