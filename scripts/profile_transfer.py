"""Measure a server that prefills and one that decodes, by the codes in which K and V travel.

    python -m scripts.profile_transfer --prompt 16384 --answer 64 --rates 0.5 --requests 16 \
        --systems inline --link-gbps 10 --out results/
    python -m scripts.profile_transfer --model bundled --prompt 600 --answer 16 --rates 2 \
        --requests 4 --systems dense inline --link-gbps 0.05              # without a GPU

Requests come at random times, at so many a second (a Poisson process), and say themselves in which
codes they travel; so one pair of servers measures all `--codes`, at each of `--rates`. A system is
what decodes; it is served on the second GPU, and what prefills on the first. This is what figures 9
and 10 of HACK show. With `lynx-drafts` or `quantspec-drafts` requests draft on one half of the bits
while the other one comes, and with `--seen` what prefills has the prompts in its cache, as in
figures 9 to 12 of Lynx.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from cache_rank.channels.rate import LINK_GBPS_VARIABLE
from scripts.shared import machine
from scripts.shared.command import UsageError, make_parser, run
from scripts.shared.models import model_config
from scripts.shared.report import number, table_of
from scripts.shared.serving import Client, Server, free_port
from scripts.shared.statistics import quantile
from scripts.shared.streaming import Answer, connect, follow
from scripts.speed import serving
from scripts.speed.serving import SEED, Job, Results, Shape

LOAD_SECONDS = 600
SECRET_VARIABLE = "CACHE_RANK_TRANSFER_SECRET"

EXPLANATION = """\
JCT is from a request sent to its last token, TTFT to its first; these, and times to other tokens,
are means of the requests. A transfer is from the first tokens that the prefill server has computed
until the decode server has all. Drafts are those of all requests."""

TOKENS = 2, 32, 64
"""The first tokens that attend to a prompt, and those to which Lynx has times."""


class Measurement(serving.Measurement, kw_only=True):
    """One system with some codes, at one rate of requests; times are in seconds."""

    codes: str
    rate: float  # requests a second
    jct: list[float] = msgspec.field(default_factory=list)
    ttft: list[float] = msgspec.field(default_factory=list)
    until: dict[int, list[float]] = msgspec.field(default_factory=dict)  # from it to a token
    drafts: int = 0  # of all requests
    accepted: int = 0  # of these
    transfer: float = 0.0  # of a request
    megabytes: float = 0.0  # sent for a request


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with jobs; UsageError if it is wrong."""
    parser = make_parser("profile_transfer", __doc__)
    serving.add_engine_options(parser, budget=None)
    add = parser.add_argument
    add("--prompt", type=int, default=16384, help="tokens of a prompt")
    add("--answer", type=int, default=64, help="tokens of an answer")
    add("--rates", nargs="+", type=float, default=[0.5], help="requests a second")
    add("--requests", type=int, default=16, help="of each measurement")
    add("--codes", nargs="+", default=["bf16", "quantspec", "hack"], help="as --wire-codes")
    add("--seen", action="store_true", help="each prompt has been prefilled before")
    add("--link-gbps", type=float, help="K and V travel as over a link of so many Gbit/s")
    options = parser.parse_args(argv)
    numbers = [options.prompt, options.answer - 1, options.requests, *options.rates]
    numbers += [] if options.link_gbps is None else [options.link_gbps]
    if min(numbers) <= 0:
        raise UsageError("--answer must be at least 2, and all other numbers positive")
    shape = [Shape(options.requests, options.prompt + options.answer)]
    options.jobs = [serving.make_job(label, shape, options) for label in options.systems]
    for job in options.jobs:
        if job.cache_rank or job.gpus > 1:
            raise UsageError(f"{job.system}: what decodes has one GPU and no cache rank")
        job.servers = 2
    cached = {"disable_radix_cache": not options.seen}
    options.prefill = serving.make_job("dense", shape, options).engine | cached
    return options


def flags_of_pair(options: argparse.Namespace, job: Job) -> list[dict[str, object]]:
    """The engine arguments of the server that prefills, and of the one that decodes."""
    port = free_port()
    common = {"disaggregation_transfer_backend": "coded", "disaggregation_bootstrap_port": port}
    prefill = {**options.prefill, "disaggregation_mode": "prefill", "enable_metrics": True}
    decode = {**job.engine, "disaggregation_mode": "decode"}
    if any(codes.endswith("-drafts") for codes in options.codes):
        decode["wire_drafts"] = 64
    return [{**prefill, **common}, {**decode, **common}]


async def send_both(
    servers: Sequence[Client], port: int, arrivals: Sequence[tuple[float, list[int]]],
    codes: str, count: int,
) -> list[Answer]:  # fmt: skip
    """Send each prompt at its time to both servers; the answers of the one that decodes."""

    async def ask(after: float, prompt: list[int]) -> Answer:
        await asyncio.sleep(after)
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        body = pair | {"bootstrap_room": secrets.randbits(62)}
        answers = [Answer(len(prompt)) for _ in servers]
        name, _, drafts = codes.partition("-")
        custom = {"wire_codes": name, "wire_drafts": bool(drafts)}
        sampling: dict[str, Any] = {"max_new_tokens": count, "custom_params": custom}
        asked = [
            follow(session, server.url, prompt, answer, options=body, **sampling)
            for server, answer in zip(servers, answers, strict=True)
        ]
        await asyncio.gather(*asked)
        return answers[1]

    async with connect() as session, asyncio.timeout(LOAD_SECONDS):
        return list(await asyncio.gather(*(ask(*arrival) for arrival in arrivals)))


def sums_of_transfers(prefill: Client) -> tuple[float, float]:
    """Seconds and megabytes of all transfers so far."""
    text = prefill.get("/metrics").text
    found = (
        re.findall(rf"^sglang:kv_transfer_{name}_sum\S* (\S+)$", text, re.MULTILINE)
        for name in ("latency_ms", "total_mb")
    )
    milliseconds, megabytes = (sum(map(float, each)) for each in found)
    return milliseconds / 1e3, megabytes


def measure(
    options: argparse.Namespace, servers: Sequence[Server], job: Job, measurement: Measurement
) -> None:
    """Send one request that does not count, and then the load."""
    port = job.engine["disaggregation_bootstrap_port"]
    vocabulary = model_config(job.model)["vocab_size"]
    lengths = [options.prompt] * (options.requests + 1)
    first, *prompts = serving.make_prompts(lengths, vocabulary, SEED)
    source, arrivals, now = random.Random(SEED), [], 0.0
    for prompt in prompts:
        arrivals.append((now, prompt))
        now += source.expovariate(measurement.rate)
    of_load = measurement.codes, options.answer
    asyncio.run(send_both(servers, port, [(0.0, first)], *of_load))
    if options.seen:
        asyncio.run(send_both(servers, port, [(0.0, prompt) for prompt in prompts], "hack", 2))
    before = sums_of_transfers(servers[0])
    answers = asyncio.run(send_both(servers, port, arrivals, *of_load))
    totals = zip(sums_of_transfers(servers[0]), before, strict=True)
    of_a_request = ((now - then) / len(answers) for now, then in totals)
    measurement.transfer, measurement.megabytes = of_a_request
    measurement.jct = [answer.times[-1] - answer.sent for answer in answers]
    measurement.ttft = [answer.seconds_to(1) for answer in answers]
    for token in (token for token in TOKENS if token <= options.answer):
        measurement.until[token] = [answer.seconds_to(token) for answer in answers]
    statistics = [answer.statistics for answer in answers]
    measurement.drafts = sum(each.get("wire_drafts", 0) for each in statistics)
    measurement.accepted = sum(each.get("wire_drafts_accepted", 0) for each in statistics)


def write_results(results: Results, out: Path) -> list[Path]:
    """Write the measurements and a table into a folder; the files."""
    table = table_of(map(_row, results.measurements))
    return results.write(out, "Prefill on another server", EXPLANATION, table)


def _row(m: Measurement) -> dict[str, str]:
    common = {"decodes": m.system, "requests/s": number(m.rate, 2), "codes": m.codes}
    if m.failure:
        return common | {"JCT mean s": m.failure}
    return common | {
        "JCT mean s": number(mean(m.jct), 3),
        "p99": number(quantile(m.jct, 0.99), 3),
        "TTFT s": number(mean(m.ttft), 3),
        **{f"token {token}": number(mean(seconds), 3) for token, seconds in m.until.items()},
        "drafts accepted": f"{m.accepted} of {m.drafts}" if m.drafts else "",
        "transfer s": number(m.transfer, 3),
        "MB": number(m.megabytes, 1),
    }


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
    if options.link_gbps is not None:
        os.environ[LINK_GBPS_VARIABLE] = str(options.link_gbps)
    results = Results.of("profile_transfer", argv, options.jobs)
    if options.jobs[0].gpus and len(machine.visible_gpus()) < 2:
        raise UsageError("there must be two GPUs")
    for job in options.jobs:
        job.each = flags_of_pair(options, job)
        job.engine = job.each[1]

    def measurements_of(job: Job) -> list[Measurement]:
        pairs = itertools.product(options.rates, options.codes)
        return [Measurement(system=job.system, rate=rate, codes=codes) for rate, codes in pairs]

    measure_one, jobs, out = partial(measure, options), options.jobs, options.out
    return serving.measure_all(results, jobs, measurements_of, measure_one, write_results, out)


if __name__ == "__main__":
    run(main, "interrupted; what was measured is in --out")
