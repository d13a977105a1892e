"""Measure time per output token of several systems side by side, and write a table.

    python -m scripts.profile_tpot --model qwen3-8b --shapes 8x32768 16x32768 \
        --systems floor dense fp8 tp2 quest cache-rank cache-rank:dense_layers=0 --out results/
    python -m scripts.profile_tpot --model bundled --shapes 2x600 --systems dense cache-rank \
        --sparse-threshold 300 --sparse-budget 64                # without a GPU

Results are written as they come, in JSON and Markdown; `--resume` measures what is missing, on the
same kind of GPUs and with the same settings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripts.shared import machine
from scripts.shared.command import UsageError, make_parser, run
from scripts.shared.report import number, table_of
from scripts.speed.bench import Measurement, measure_shape
from scripts.speed.serving import Job, Results, Shape, add_engine_options, make_job, measure_all
from sglang_ext.flags import SPARSE_THRESHOLD

EXPLANATION = """\
TPOT is the median decode step of the batch (p10–p90), and its spread is that of the windows'
medians; all systems are measured from the same stream of tokens."""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with jobs and what OUT holds already; UsageError if it is wrong."""
    parser = make_parser("profile_tpot", __doc__)
    add_engine_options(parser, budget=2048)
    add = parser.add_argument
    add("--shapes", nargs="+", type=Shape.parse, required=True, help="BATCHxCONTEXT")
    add("--resume", action="store_true", help="keep what OUT holds and measure the rest")
    options = parser.parse_args(argv)
    options.jobs = [make_job(label, options.shapes, options) for label in options.systems]
    for job in options.jobs:
        if job.cache_rank and job.engine["sparse_threshold"] is None:
            job.engine["sparse_threshold"] = SPARSE_THRESHOLD  # what is measured are sparse steps
    results = options.results = Results.of("profile_tpot", argv, [])
    results.conditions = conditions(options, results.machine)
    earlier = read_results(options.out)
    if earlier.measurements and not options.resume:
        raise UsageError(f"{options.out} has results: pass --resume, or another --out")
    if earlier.measurements:
        if (then := earlier.conditions) != (now := results.conditions):
            raise UsageError(
                f"{options.out} was measured with {then}, not {now}: pass another --out"
            )
        options.results = earlier
        earlier.commands += results.commands
    return options


def conditions(options: argparse.Namespace, described: dict[str, Any]) -> dict[str, Any]:
    """What all measurements of a record have in common."""
    settings = {name: getattr(options, name) for name in ("sparse_budget", "sparse_threshold")}
    versions = {name: described.get(name) for name in machine.VERSIONS}
    kinds = sorted(set(described["gpus"]))  # not how many: jobs get as many as they need
    return {"model": options.model, **settings, **options.engine, "GPUs": kinds, **versions}


def read_results(out: Path) -> Results:
    """What a folder holds that was measured, less the failures."""
    if not (file := out / "results.json").is_file():
        return Results([], {})
    results = msgspec.json.decode(file.read_bytes(), type=Results)
    measurements = msgspec.convert(results.measurements, list[Measurement])
    results.measurements = [one for one in measurements if not one.failure]
    return results


def write_results(results: Results, out: Path) -> list[Path]:
    """Write the measurements and a table into a folder; the files."""
    by_shape = sorted(results.measurements, key=lambda m: (m.shape.context, m.shape.batch))
    return results.write(out, "Time per output token", EXPLANATION, table_of(map(_row, by_shape)))


def _row(m: Measurement) -> dict[str, str]:
    cells = {"batch × context": f"{m.shape.batch} × {m.shape.context}", "system": m.system}
    if m.mean_ms is None:
        return cells | {"TPOT ms": m.failure}
    return cells | {
        "TPOT ms": number(m.tpot_ms),
        "spread": f"{number(min(m.medians))}–{number(max(m.medians))}",
        "p10–p90": f"{number(m.p10_ms)}–{number(m.p90_ms)}",
        "mean ms": number(m.mean_ms),
        "tokens/s": number(1e3 * m.shape.batch / m.mean_ms, 0),
        "attended": number(m.attended_tokens, 0),
        "sparse steps": number(m.sparse_steps, 0),
        "prefill s": number(m.prefill_seconds, 1),
        "GiB per GPU": m.memory,
        **{name: number(value) for name, value in m.exchange.items()},
    }


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    results: Results = options.results
    measured = {(one.system, one.shape) for one in results.measurements}

    def missing(job: Job) -> list[Measurement]:
        shapes = [shape for shape in job.shapes if (job.system, shape) not in measured]
        return [Measurement(system=job.system, shape=shape) for shape in shapes]

    jobs = [job for job in options.jobs if missing(job)]
    results.jobs += jobs
    return measure_all(results, jobs, missing, measure_shape, write_results, options.out)


if __name__ == "__main__":
    run(main, "interrupted; what was measured is in --out")
