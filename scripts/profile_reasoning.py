"""Measure servers under reasoning loads: many streams of short prompts and long answers.

    python -m scripts.profile_reasoning --systems fp8 inline-fp8 --loads 64x512+12000
    python -m scripts.profile_reasoning --systems fp8 inline-fp8 tp2-fp8 --servers 2 \
        --loads 16x200-1000+8000/32000 64x200-1000+8000/32000 --rounds 4 --out results/
    python -m scripts.profile_reasoning --model bundled --systems dense inline --loads 4x200+400 \
        --sparse-threshold 300 --sparse-budget 64                # without a GPU

A load is STREAMSxPROMPT+ANSWER in tokens: 64x512+12000 has 64 streams, and each sends its next
request when its last has ended. PROMPT may be LEAST-MOST, and ANSWER may be MEAN/MOST, from which
lengths are drawn. Systems are served one after the other, and have all loads one after the other.
JSON, Markdown and a plot are written as results come.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

from scripts.shared.command import UsageError, make_parser, run
from scripts.shared.comparison import GRAPH_BATCHES
from scripts.shared.models import model_config
from scripts.shared.report import number, percent, table_of
from scripts.shared.serving import Server
from scripts.shared.streaming import Answer, Request, send
from scripts.shared.systems import System
from scripts.speed import serving
from scripts.speed.loads import Load, Measurement, Run, measure
from scripts.speed.serving import SEED, Job, Results, Shape

WARM_UP_TOKENS = 32
LOAD_SECONDS = 3600

EXPLANATION = """\
A load is STREAMSxPROMPT+ANSWER in tokens. Tokens/s is from the first request sent to the last
token. TTFT and TPOT are of requests. The gap is the longest time that a stream was silent after its
first token, and its context then. Sparse are the requests that were sparse at all, and all sparse
steps, those that draft among them, as a share of all tokens.

By context: tokens/s of all streams together by their mean context, while 90 % of them decode."""

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with its jobs; UsageError if it is wrong."""
    parser = make_parser("profile_reasoning", __doc__)
    serving.add_engine_options(parser, budget=None)
    add = parser.add_argument
    add("--loads", nargs="+", type=Load.parse, required=True,
        help="STREAMSxPROMPT+ANSWER")  # fmt: skip
    add("--servers", type=int, default=1, help="side by side, on as many GPUs: a system that takes "
        "two GPUs has half as many. A request goes to the one that has fewest")  # fmt: skip
    add("--rounds", type=int, default=1, help="requests of a stream, one after the other")
    options = parser.parse_args(argv)
    if min(options.servers, options.rounds) < 1:
        raise UsageError("--servers and --rounds must be at least 1")
    if any(label.startswith("floor") for label in options.systems):
        raise UsageError("floor answers no requests")
    options.jobs = [job_of(label, options) for label in options.systems]
    return options


def job_of(label: str, options: argparse.Namespace) -> Job:
    """The servers of a system, each of which has its share of the streams."""
    servers = max(1, options.servers // System.parse(label).gpus)
    longest = max(load.longest for load in options.loads)
    streams = -(-max(load.streams for load in options.loads) // servers)
    batches = [batch for batch in GRAPH_BATCHES if batch < streams] + [streams]
    return serving.make_job(label, [Shape(batch, longest) for batch in batches], options, servers)


def measure_load(
    options: argparse.Namespace, servers: Sequence[Server], job: Job, measurement: Measurement
) -> None:
    """Warm up with prompts of a load and short answers, send it, and measure the answers."""
    load = next(load for load in options.loads if load.name == measurement.load)
    vocabulary = model_config(job.model)["vocab_size"]

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


def write_results(results: Results, out: Path) -> list[Path]:
    """Write results.json, results.md and a plot; the files."""
    loads: dict[str, dict[str, Run]] = {}
    for measurement in results.measurements:
        if measurement.run:
            loads.setdefault(measurement.load, {})[measurement.system] = measurement.run
    tables = table_of(map(_row, results.measurements)), *map(_curves, loads, loads.values())
    files = results.write(out, "Reasoning loads", EXPLANATION, *tables)
    if loads:
        files.append(_plot(loads, out / "tokens-by-context.png"))
    return files


def _row(m: Measurement) -> dict[str, str]:
    cells = {"load": m.load, "system": m.system}
    if not m.run:
        return cells | {"tokens/s": m.failure}
    return cells | {
        "tokens/s": number(m.run.tokens_per_second, 0),
        "tokens": str(m.run.tokens),
        "seconds": number(m.run.seconds, 1),
        "TTFT s p50, p99": f"{number(m.run.ttft_p50)}, {number(m.run.ttft_p99)}",
        "TPOT ms p50, p99": f"{number(1e3 * m.run.tpot_p50)}, {number(1e3 * m.run.tpot_p99)}",
        "longest gap": f"{number(m.run.gap.seconds, 3)} s at {m.run.gap.context}",
        "sparse": f"{m.run.sparse_requests} of {m.run.requests}, {percent(m.run.sparse_share)}",
        "GiB per GPU": m.memory,
        "client busy": percent(m.run.client_share, 0),
    }


def _curves(load: str, runs: dict[str, Run]) -> str:
    """Tokens/s of one load by context, a column a system."""
    contexts = sorted({context for one in runs.values() for context in one.curve})
    return table_of(
        {
            "load": load,
            "context from": str(context),
            **{system: number(one.curve.get(context), 0) for system, one in runs.items()},
        }
        for context in contexts
    )


def _plot(loads: dict[str, dict[str, Run]], path: Path) -> Path:
    """Draw tokens/s by context, a panel a load."""
    figure = Figure((3 + 3.5 * len(loads), 3.6), layout="constrained")
    panels = figure.subplots(1, len(loads), squeeze=False)[0]
    for axes, (load, runs) in zip(panels, loads.items(), strict=True):
        axes.set_prop_cycle(color=COLOURS, marker=list("osD^vPX*"))
        for system, one in runs.items():
            axes.plot(list(one.curve), list(one.curve.values()), label=system, markersize=4)
        axes.set(title=load, xlabel="mean context", ylabel="tokens/s of all streams")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    return path


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    results = Results.of("profile_reasoning", argv, options.jobs)

    def measurements_of(job: Job) -> list[Measurement]:
        return [Measurement(system=job.system, load=load.name) for load in options.loads]

    measure_one, out = partial(measure_load, options), options.out
    return serving.measure_all(
        results, options.jobs, measurements_of, measure_one, write_results, out
    )


if __name__ == "__main__":
    run(main, "interrupted; what was measured is in --out")
