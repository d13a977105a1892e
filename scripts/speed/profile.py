"""Runs what `profile_tpot` is asked for, and writes what it measured."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
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

VERSIONS = ("sglang", "torch")
"""The packages whose versions are recorded."""

_MAY_DIFFER = frozenset({"capacity", "shape_seconds"})
"""The settings that may differ when a record is resumed: they change no measurement."""


def read_earlier(out: Path) -> Results:
    """What a folder holds that was measured; nothing of a record of failures alone."""
    file = out / "results.json"
    results = report.read_results(file) if file.is_file() else Results()
    results.measurements = [m for m in results.measurements if m.tpot_ms]
    return results if results.measurements else Results()


def refuse_change(out: Path, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the conditions of a folder's measurements with those of now.

    Raises:
        ValueError: they differ.
    """
    for name, value in now.items():
        if value != earlier.get(name):
            raise ValueError(
                f"{out} was measured with {name} {earlier.get(name)}, not {value}: "
                "pass another --out"
            )


def _of_settings(settings: Settings) -> dict[str, Any]:
    values = msgspec.structs.asdict(settings)
    return {name: value for name, value in values.items() if name not in _MAY_DIFFER}


def _of_machine(described: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of GPUs, not how many: jobs are given as many as they need."""
    kinds = ", ".join(sorted(set(described.get("gpus") or []))) or "none"
    return {"GPUs": kinds, **{name: described.get(name) for name in VERSIONS}}


def make_jobs(options: Namespace, results: Results) -> list[Job]:
    """The jobs, less what the results hold already.

    Raises:
        ValueError: an unknown model or system, a batch that its servers cannot share, or results
            of the same model by other settings.
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
    models = {job.model for job in jobs}
    for earlier in results.jobs:
        if earlier.model in models and results.of(earlier):
            refuse_change(options.out, _of_settings(earlier.settings), _of_settings(settings))
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
    """Measure what OUT lacks, unless told to render or to describe only.

    Returns:
        The exit status: 1 if something that was asked for could not be measured.

    Raises:
        OSError: there is no record to render, or it cannot be written.
        ValueError: an unknown model or system, or OUT does not suit the options.
    """
    if options.render:
        write_files(report.read_results(options.render / "results.json"), options.render)
        return 0
    earlier = read_earlier(options.out)
    results = earlier if options.resume else Results()
    jobs = make_jobs(options, results)
    if options.dry_run:
        print(report.describe_jobs(jobs))
        return 0
    if earlier.measurements and not options.resume:
        raise ValueError(f"{options.out} has results: pass --resume, or another --out")
    gpus = options.gpus.split(",") if options.gpus else machine.visible_gpus()
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    described = machine.describe(gpus) | versions
    if results.measurements:
        refuse_change(options.out, _of_machine(results.machine), _of_machine(described))
        results.earlier_commands.append(results.command)
    names = {job.name for job in jobs}
    results.experiment = options.experiment or ""
    results.command = ["python", "-m", "scripts.profile_tpot", *argv]
    # Of one machine the record says all GPUs that a run had, also when the next one has fewer.
    results.machine = max(described, results.machine, key=lambda m: len(m.get("gpus") or []))
    results.jobs = [job for job in results.jobs if job.name not in names] + jobs
    stop_on_sigterm()
    try:
        run_all(results, jobs, gpus, options)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
        return 130
    finally:
        write_files(results, options.out)
    return 1 if make_jobs(options, results) else 0  # what is still to be done has failed


def write_files(results: Results, out: Path) -> None:
    """Write tables and plots, and say which files they are."""
    plots = report.write_plots(results, out)
    for path in (*report.write_results(results, out), *plots):
        print(path)
    if not plots:
        print("no plots: nothing was measured, or matplotlib is not installed", file=sys.stderr)
