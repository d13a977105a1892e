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
import asyncio
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from scripts.reasoning.client import send
from scripts.reasoning.loads import Load, Request
from scripts.reasoning.measures import Measurement, measure
from scripts.reasoning.report import write_results
from scripts.shared.command import explained, make_parser, run
from scripts.shared.comparison import GRAPH_BATCHES
from scripts.shared.models import model_config
from scripts.shared.serving import Server
from scripts.shared.streaming import Answer
from scripts.shared.systems import System
from scripts.speed.jobs import SEED, Job, Shape, add_engine_options, make_job
from scripts.speed.serving import Results, measure_all

WARM_UP_TOKENS = 32
LOAD_SECONDS = 3600


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with its jobs; ends if it is wrong."""
    parser = make_parser("profile_reasoning", __doc__)
    add_engine_options(parser, budget=None)
    add = parser.add_argument
    add("--loads", nargs="+", type=explained(Load.parse), required=True,
        help="STREAMSxPROMPT+ANSWER")  # fmt: skip
    add("--servers", type=int, default=1, help="side by side, on as many GPUs: a system that takes "
        "two GPUs has half as many. A request goes to the one that has fewest")  # fmt: skip
    add("--rounds", type=int, default=1, help="requests of a stream, one after the other")
    options = parser.parse_args(argv)
    if min(options.servers, options.rounds) < 1:
        parser.error("--servers and --rounds must be at least 1")
    if any(label.startswith("floor") for label in options.systems):
        parser.error("floor answers no requests")
    try:
        options.jobs = [job_of(label, options) for label in options.systems]
    except ValueError as error:
        parser.error(str(error))
    return options


def job_of(label: str, options: argparse.Namespace) -> Job:
    """The servers of a system, each of which has its share of the streams."""
    servers = max(1, options.servers // System.parse(label).gpus)
    longest = max(load.longest for load in options.loads)
    streams = -(-max(load.streams for load in options.loads) // servers)
    batches = [batch for batch in GRAPH_BATCHES if batch < streams] + [streams]
    return make_job(label, [Shape(batch, longest) for batch in batches], options, servers)


def measure_load(
    servers: Sequence[Server], options: argparse.Namespace, measurement: Measurement
) -> None:
    """Warm up with prompts of a load and short answers, send it, and measure the answers."""
    load = next(load for load in options.loads if load.name == measurement.load)
    vocabulary = model_config(options.model)["vocab_size"]

    async def in_time(requests: Sequence[Request], note: Callable[[int], object]) -> list[Answer]:
        async with asyncio.timeout(LOAD_SECONDS):
            return await send([server.url for server in servers], requests, load.streams, note)

    first = load.draw(1, vocabulary, SEED)
    warm_up = [Request(request.prompt, WARM_UP_TOKENS) for request in first]
    asyncio.run(in_time(warm_up, lambda tokens: None))
    requests = load.draw(options.rounds, vocabulary, SEED + 1)
    total = sum(request.answer for request in requests)
    with tqdm(total=total, unit="tok", unit_scale=True, desc=load.name) as bar:
        busy = time.process_time()
        answers = asyncio.run(in_time(requests, bar.update))
        measurement.run = measure(load, answers, time.process_time() - busy)


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_options(argv)
    results = Results.of("profile_reasoning", argv, options.jobs)

    def measurements_of(job: Job) -> list[Measurement]:
        return [Measurement(system=job.system, load=load.name) for load in options.loads]

    def measure_one(servers: Sequence[Server], job: Job, measurement: Measurement) -> None:
        measure_load(servers, options, measurement)

    jobs, out = options.jobs, options.out
    return measure_all(results, jobs, measurements_of, measure_one, write_results, out)


if __name__ == "__main__":
    run(main, "interrupted; what was measured is in --out")
