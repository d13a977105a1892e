"""Measure servers under reasoning loads: many streams of short prompts and long answers.

    python -m scripts.profile_reasoning --systems fp8 inline-fp8 --loads 64x512+12000
    python -m scripts.profile_reasoning --systems fp8 inline-fp8 tp2-fp8 --servers 2 \
        --loads 16x200-1000+8000/32000 64x200-1000+8000/32000 --rounds 4 --out results/
    python -m scripts.profile_reasoning --model bundled --systems dense inline --loads 4x200+400 \
        --sparse-threshold 300 --sparse-budget 64                # without a GPU

A load is STREAMSxPROMPT+ANSWER in tokens: 64x512+12000 has 64 streams, and each sends its next
request when its last has ended. PROMPT may be LEAST-MOST, and ANSWER may be MEAN/MOST, from which
lengths are drawn. Systems are served one after the other, and have all loads one after the other.

Weights are random numbers in the shapes of `model_shapes`. A system that fails is a line in the
table, and its log is in OUT/logs. The exit status is 1 then. JSON, Markdown and a plot are written
as results come.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from scripts.reasoning.loads import Load
from scripts.reasoning.measures import Measurement, Results
from scripts.reasoning.report import write_results
from scripts.reasoning.serving import job_of, run_job
from scripts.shared import machine
from scripts.shared.command import command_line, explained, make_parser, run
from scripts.speed.jobs import add_engine_options


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends if it is wrong."""
    parser = make_parser("profile_reasoning", __doc__)
    add_engine_options(parser, budget=None)
    add = parser.add_argument
    add("--loads", nargs="+", type=explained(Load.parse), required=True,
        help="STREAMSxPROMPT+ANSWER")  # fmt: skip
    add("--servers", type=int, default=1, help="side by side, on as many GPUs: a system that takes "
        "two GPUs has half as many. A request goes to the one that has fewest")  # fmt: skip
    add("--rounds", type=int, default=1, help="requests of a stream, one after the other")
    add("--repeats", type=int, default=1, help="times that a load is sent, with other prompts")
    add("--load-seconds", type=float, default=3600.0, help="deadline of one run of a load")
    options = parser.parse_args(argv)
    if min(options.servers, options.rounds, options.repeats) < 1:
        parser.error("--servers, --rounds and --repeats must be at least 1")
    if any(label.startswith("floor") for label in options.systems):
        parser.error("floor answers no requests")
    try:
        options.jobs = [job_of(label, options) for label in options.systems]
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options, gpus = parse_options(argv), machine.visible_gpus()
    results = Results(
        [command_line("profile_reasoning", argv)], machine.describe(gpus), options.jobs
    )
    files: list[Path] = []

    def note(measurement: Measurement) -> None:
        results.measurements.append(measurement)
        files[:] = write_results(results, options.out)

    for job in options.jobs:
        run_job(job, options, gpus, note)
    print(*files, sep="\n")
    return int(any(measurement.failure for measurement in results.measurements))


if __name__ == "__main__":
    run(main)
