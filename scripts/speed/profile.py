"""Runs what `profile_tpot` is asked for, and writes what it measured."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from scripts.shared import machine
from scripts.shared.command import command_line
from scripts.shared.serving import stop_on_sigterm
from scripts.speed import report
from scripts.speed.bench import measure_shape
from scripts.speed.jobs import Job, Settings, make_job
from scripts.speed.records import Measurement, Results
from scripts.speed.serving import measure_each


def read_earlier(out: Path) -> Results:
    """What a folder holds that was measured; nothing of a record of failures alone."""
    file = out / "results.json"
    results = report.read_results(file) if file.is_file() else Results()
    results.measurements = [m for m in results.measurements if m.tpot_ms]
    return results if results.measurements else Results()


def conditions(settings: Settings, described: Mapping[str, Any]) -> dict[str, Any]:
    """What all measurements of a record have in common.

    Of the machine it is the kinds of GPUs, not how many: jobs are given as many as they need.
    """
    kept = msgspec.structs.asdict(settings)
    del kept["shape_seconds"]  # changes no measurement
    kinds = ", ".join(sorted(set(described.get("gpus") or []))) or "none"
    return {**kept, "GPUs": kinds, **{name: described.get(name) for name in machine.VERSIONS}}


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


def make_jobs(options: Namespace, settings: Settings, results: Results) -> list[Job]:
    """The jobs, less what the results hold already.

    Raises:
        ValueError: there is no such model or system.
    """
    jobs = [make_job(system, options.shapes, settings) for system in options.systems]
    for job in jobs:
        measured = {m.shape for m in results.of(job) if m.tpot_ms}
        job.shapes = [shape for shape in job.shapes if shape not in measured]
    return [job for job in jobs if job.shapes]


def run_all(results: Results, jobs: Sequence[Job], gpus: Sequence[str], options: Namespace) -> None:
    """Run jobs, and add what they measure to the results, which are written as they come."""
    bar = tqdm(total=sum(len(job.shapes) for job in jobs), unit="shape", dynamic_ncols=True)

    def note(measurement: Measurement) -> None:
        results.measurements.append(measurement)
        report.write_results(results, options.out)
        bar.update()

    with bar:
        for job in jobs:
            bar.set_description(job.system)
            left = [Measurement(job.system, shape) for shape in job.shapes]
            measure_each(left, measure_shape, note, job, gpus, options.out)


def profile(options: Namespace, argv: Sequence[str]) -> int:
    """Measure what OUT lacks.

    Returns:
        The exit status: 1 if something that was asked for could not be measured.

    Raises:
        OSError: the record cannot be read or written.
        ValueError: there is no such model or system, or OUT does not suit the options.
    """
    earlier = read_earlier(options.out)
    results = earlier if options.resume else Results()
    settings = Settings(**{name: getattr(options, name) for name in Settings.__struct_fields__})
    jobs = make_jobs(options, settings, results)
    if earlier.measurements and not options.resume:
        raise ValueError(f"{options.out} has results: pass --resume, or another --out")
    gpus = machine.visible_gpus()
    described = machine.describe(gpus)
    if results.settings:
        then = conditions(results.settings, results.machine)
        refuse_change(options.out, then, conditions(settings, described))
    systems = {job.system for job in jobs}
    results.commands.append(command_line("profile_tpot", argv))
    # Of one machine the record says all GPUs that a run had, also when the next one has fewer.
    results.machine = max(described, results.machine, key=lambda m: len(m.get("gpus") or []))
    results.settings = settings
    results.jobs = [job for job in results.jobs if job.system not in systems] + jobs
    stop_on_sigterm()
    try:
        run_all(results, jobs, gpus, options)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
        return 130
    finally:
        for path in report.write_results(results, options.out):
            print(path)
    # What is still to be done has failed.
    return 1 if make_jobs(options, settings, results) else 0
