"""Measure the time to the first token of prompts that a server has seen before.

    python -m scripts.profile_ttft --lengths 8192 32768 --out results/ --systems \
        dense:disable_radix_cache=false cache-rank-working-set:kv_residency=bf16
    python -m scripts.profile_ttft --model bundled --lengths 1200 --sparse-threshold 300 \
        --sparse-budget 64 --systems dense:disable_radix_cache=false cache-rank-working-set

For each length, a prompt is asked `--repeats` times new and again, and as many conversations grow
to the length in four turns, of which each begins with all that was said before. Requests come one
after the other. Weights are random numbers in the shapes of `model_shapes`. A system that fails is
a line in the table, and its log is in OUT/logs; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
from tqdm import tqdm

from scripts.shared import machine
from scripts.shared.command import command_line, make_parser, run
from scripts.shared.report import number, provenance, table_of, write_report
from scripts.shared.serving import Client, Server
from scripts.shared.streaming import chunks_of, connect
from scripts.speed.bench import make_prompts
from scripts.speed.jobs import Job, Settings, Shape, add_engine_options, make_job
from scripts.speed.serving import measure_each

TURNS = 4
LEAST_ANSWER = 64
"""Tokens of an answer, beside those of the steps in which a prompt is shipped."""
SHIPPED_A_STEP = 512
REQUEST_SECONDS = 600

EXPLANATION = """\
TTFT is from a request sent to its first token, the median of several; cached are the tokens of its
prompt that were not computed. A conversation has four turns of the same number of new tokens."""


class Asked(msgspec.Struct):
    """Requests of one kind: seconds to the first token, and tokens of a prompt in a cache."""

    kind: str
    seconds: list[float] = []
    cached: list[int] = []


class Measurement(msgspec.Struct):
    """One system at one length."""

    system: str
    length: int
    failure: str = ""  # why there are no numbers
    asked: list[Asked] = []
    memory_gib: list[float] = []  # in use at the end, one entry a GPU


class Results(msgspec.Struct):
    """All that is written: the command, the machine, the engines, and what was measured."""

    command: str
    machine: dict[str, Any]
    jobs: list[Job]
    measurements: list[Measurement] = []


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends if it is wrong."""
    parser = make_parser("profile_ttft", __doc__)
    add_engine_options(parser, budget=2048)
    add = parser.add_argument
    add("--lengths", nargs="+", type=int, required=True, help="tokens of prompts")
    add("--repeats", type=int, default=5, help="prompts and conversations of each length")
    options = parser.parse_args(argv)
    if options.repeats < 1 or min(options.lengths) < 2 * TURNS:
        parser.error(f"--repeats must be at least 1, and --lengths at least {2 * TURNS}")
    given = {k: v for k, v in vars(options).items() if k in Settings.__struct_fields__}
    shapes = [Shape(1, length + _answer(length)) for length in options.lengths]
    try:
        options.jobs = [make_job(label, shapes, Settings(**given)) for label in options.systems]
    except ValueError as error:
        parser.error(str(error))
    return options


def _answer(length: int) -> int:
    return LEAST_ANSWER + length // SHIPPED_A_STEP


def ask(client: Client, prompt: list[int], asked: Asked) -> list[int]:
    """Ask, note when the first token came and what was cached, and return the answer."""
    return asyncio.run(_ask(client.url, prompt, asked))


async def _ask(url: str, prompt: list[int], asked: Asked) -> list[int]:
    parameters = {"max_new_tokens": _answer(len(prompt)), "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters}
    answer = list[int]()
    async with asyncio.timeout(REQUEST_SECONDS), connect() as session:
        sent = time.perf_counter()
        async for chunk in chunks_of(session, url, body):
            if not answer:
                asked.seconds.append(time.perf_counter() - sent)
                asked.cached.append(chunk["meta_info"]["cached_tokens"])
            answer += chunk["output_ids"]
    return answer


def measure(client: Client, job: Job, repeats: int, measurement: Measurement) -> None:
    """Ask prompts of a length and hold conversations, after one of each that does not count."""
    length, seed = measurement.length, job.settings.seed
    drawn = make_prompts([length] * 2 * (repeats + 1), job.vocabulary, seed + length)
    kinds = ["new", "again", *(f"turn {turn}" for turn in range(1, TURNS + 1))]
    for repeat in tqdm(range(repeats + 1), desc=f"{measurement.system} {length}"):
        asked = [Asked(kind) for kind in kinds]
        alone, spoken = drawn[2 * repeat], drawn[2 * repeat + 1]
        for each in asked[:2]:
            ask(client, alone, each)
        said, step = list[int](), length // TURNS
        for turn, each in enumerate(asked[2:]):
            said += spoken[turn * step : (turn + 1) * step]
            said += ask(client, said, each)
        if repeat == 0:
            measurement.asked = [Asked(kind) for kind in kinds]
            continue
        for total, each in zip(measurement.asked, asked, strict=True):
            total.seconds += each.seconds
            total.cached += each.cached


def _rows(measurement: Measurement) -> list[dict[str, str]]:
    system, length = {"system": measurement.system}, {"length": str(measurement.length)}
    if measurement.failure:
        return [system | {"request": measurement.failure.replace("|", "/")} | length]
    return [
        system
        | {"request": each.kind}
        | length
        | {
            "TTFT ms": number(1e3 * median(each.seconds), 1),
            "least, most": ", ".join(
                number(1e3 * bound, 1) for bound in (min(each.seconds), max(each.seconds))
            ),
            "cached": number(median(each.cached), 0),
        }
        for each in measurement.asked
    ]


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options, gpus = parse_options(argv), machine.visible_gpus()
    results = Results(command_line("profile_ttft", argv), machine.describe(gpus), options.jobs)

    def note(measurement: Measurement) -> None:
        results.measurements.append(measurement)
        rows = (row for each in results.measurements for row in _rows(each))
        head = f"# Time to the first token: {options.model}"
        parts = [head, provenance([results.command], results.machine), EXPLANATION, table_of(rows)]
        write_report(options.out, "results", results, "\n\n".join(parts))

    def measure_length(servers: list[Server], job: Job, measurement: Measurement) -> None:
        measure(servers[0], job, options.repeats, measurement)

    for job in options.jobs:
        lengths = [Measurement(job.system, length) for length in options.lengths]
        measure_each(lengths, measure_length, note, job, gpus, options.out)
    return int(any(measurement.failure for measurement in results.measurements))


if __name__ == "__main__":
    run(main)
