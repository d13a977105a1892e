"""Measure the time to the first token of prompts that a server has seen before.

    python -m scripts.profile_ttft --lengths 8192 32768 --out results/ --systems \
        dense:disable_radix_cache=false cache-rank-working-set:kv_residency=bf16
    python -m scripts.profile_ttft --model bundled --lengths 1200 --sparse-threshold 300 \
        --sparse-budget 64 --systems dense:disable_radix_cache=false cache-rank-working-set

For each length, `--repeats` prompts are asked new and again, and as many conversations grow to the
length in four turns, of which each begins with all that was said before. Conversations take turns,
so that many of them need more memory than one. Requests come one after the other. Over a slow link,
`--link-gbps`, formats differ: what comes back are their codes. A wait of more than
`--cache-rank-timeout` seconds is a loss.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from cache_rank.channels.rate import LINK_GBPS_VARIABLE
from scripts.shared.command import UsageError, make_parser, run
from scripts.shared.models import model_config
from scripts.shared.report import number, table_of
from scripts.shared.serving import Client
from scripts.shared.streaming import Request, send
from scripts.speed import serving
from scripts.speed.serving import SEED, Job, Results, Shape

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


class Measurement(serving.Measurement, kw_only=True):
    """One system at one length."""

    length: int
    asked: list[Asked] = msgspec.field(default_factory=list)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with jobs; UsageError if it is wrong."""
    parser = make_parser("profile_ttft", __doc__)
    serving.add_engine_options(parser, budget=2048)
    add = parser.add_argument
    add("--lengths", nargs="+", type=int, required=True, help="tokens of prompts")
    add("--repeats", type=int, default=5, help="prompts and conversations of each length")
    add("--link-gbps", type=float, help="prompts come back as over a link of so many Gbit/s")
    options = parser.parse_args(argv)
    if options.link_gbps is not None:
        if options.link_gbps <= 0:
            raise UsageError("--link-gbps must be positive")
        os.environ[LINK_GBPS_VARIABLE] = str(options.link_gbps)
    if options.repeats < 1 or min(options.lengths) < 2 * TURNS:
        raise UsageError(f"--repeats must be at least 1, and --lengths at least {2 * TURNS}")
    shapes = [Shape(1, length + _answer(length)) for length in options.lengths]
    options.jobs = [serving.make_job(label, shapes, options) for label in options.systems]
    return options


def _answer(length: int) -> int:
    return LEAST_ANSWER + length // SHIPPED_A_STEP


def ask(client: Client, prompt: list[int], asked: Asked) -> list[int]:
    """Ask, note when the first token came and what was cached, and return the answer."""
    request = Request(prompt, _answer(len(prompt)))
    sent = send([client.url], [request], 1, lambda tokens: None)
    (answer,) = asyncio.run(asyncio.wait_for(sent, REQUEST_SECONDS))
    asked.seconds.append(answer.times[0] - answer.sent)
    asked.cached.append(answer.cached)
    return answer.output


def measure(repeats: int, servers: Sequence[Client], job: Job, measurement: Measurement) -> None:
    """Ask prompts of a length and hold conversations, after one of each that does not count."""
    length, vocabulary = measurement.length, model_config(job.model)["vocab_size"]
    drawn = serving.make_prompts([length] * 2 * (repeats + 1), vocabulary, SEED + length)
    kinds = ["new", "again", *(f"turn {turn}" for turn in range(1, TURNS + 1))]
    uncounted, measurement.asked = ([Asked(kind) for kind in kinds] for _ in range(2))
    for asked, prompts in ((uncounted, drawn[:2]), (measurement.asked, drawn[2:])):
        for prompt in prompts[::2]:
            for each in asked[:2]:
                ask(servers[0], prompt, each)
        converse(servers[0], prompts[1::2], asked[2:])


def converse(client: Client, texts: list[list[int]], turns: list[Asked]) -> None:
    """Hold a conversation for each text, of which a part is added in each turn."""
    said: list[list[int]] = [[] for _ in texts]
    for turn, asked in enumerate(turns):
        for text, conversation in zip(texts, said, strict=True):
            step = len(text) // len(turns)
            conversation += text[turn * step : (turn + 1) * step]
            conversation += ask(client, conversation, asked)


def write_results(results: Results, out: Path) -> list[Path]:
    """Write the measurements and a table into a folder; the files."""
    rows = (row for each in results.measurements for row in _rows(each))
    return results.write(out, "Time to the first token", EXPLANATION, table_of(rows))


def _rows(m: Measurement) -> list[dict[str, str]]:
    common = {"system": m.system, "length": str(m.length)}
    if m.failure:
        return [common | {"request": m.failure}]
    return [
        {
            **common,
            "request": each.kind,
            "TTFT ms": number(1e3 * median(each.seconds), 1),
            "least": number(1e3 * min(each.seconds), 1),
            "most": number(1e3 * max(each.seconds), 1),
            "cached": number(median(each.cached), 0),
        }
        for each in m.asked
    ]


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    results = Results.of("profile_ttft", argv, options.jobs)

    def measurements_of(job: Job) -> list[Measurement]:
        return [Measurement(system=job.system, length=length) for length in options.lengths]

    measure_one, jobs, out = partial(measure, options.repeats), options.jobs, options.out
    return serving.measure_all(results, jobs, measurements_of, measure_one, write_results, out)


if __name__ == "__main__":
    run(main, "interrupted; what was measured is in --out")
