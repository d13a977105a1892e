"""Runs what `profile_tpot` is asked for, and writes what it measured."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from scripts.shared import machine
from scripts.shared.serving import stop_on_sigterm
from scripts.speed import report
from scripts.speed.experiments import EXPERIMENT_MODELS, EXPERIMENTS
from scripts.speed.jobs import Job, Settings, Wish, make_job
from scripts.speed.records import Results
from scripts.speed.runner import Runner


def make_wishes(options: Namespace) -> list[Wish]:
    """What to measure."""
    if options.experiment:
        models = options.model or EXPERIMENT_MODELS[options.experiment]
        return EXPERIMENTS[options.experiment](models)
    shapes = tuple(options.shapes)
    return [Wish(model, system, shapes) for model in options.model for system in options.systems]


def make_jobs(options: Namespace, results: Results) -> list[Job]:
    """The jobs, less what the results hold already.

    Raises:
        ValueError: an unknown model or system.
    """
    settings = Settings(**{name: getattr(options, name) for name in Settings.__struct_fields__})
    jobs = [make_job(wish, settings, options.out) for wish in make_wishes(options)]
    for job in jobs:
        job.shapes = [s for s in job.shapes if not results.find(job.model, job.system, s)]
        if any(
            m.capacity_search and m.tpot_ms and m.system == job.system and m.model == job.model
            for m in results.measurements
        ):
            job.capacity = 0
    return [job for job in jobs if job.shapes or job.capacity]


def profile(options: Namespace, argv: Sequence[str]) -> int:
    """Measure what OUT lacks, unless told to render or to describe only; the exit status.

    Raises:
        ValueError: an unknown model or system.
    """
    if options.render:
        write_files(report.read_results(options.render / "results.json"), options.render)
        return 0
    results = Results()
    if options.resume and (options.out / "results.json").is_file():
        results = report.read_results(options.out / "results.json")
        results.measurements = [m for m in results.measurements if m.tpot_ms]
    jobs = make_jobs(options, results)
    gpus = options.gpus.split(",") if options.gpus else machine.visible_gpus()
    results.experiment = options.experiment or ""
    results.command = ["python", "-m", "scripts.profile_tpot", *argv]
    results.machine = machine.describe(gpus)
    names = {job.name for job in jobs}
    results.jobs = [job for job in results.jobs if job.name not in names] + jobs
    if options.dry_run:
        print(report.describe_jobs(jobs))
        return 0
    stop_on_sigterm()
    runner = Runner(results, jobs, options.out, gpus, options.concurrent, options.worker_seconds)
    try:
        runner.run()
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
