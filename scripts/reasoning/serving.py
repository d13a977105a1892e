"""Sends loads to the servers of a system."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Callable, Sequence

from tqdm import tqdm

from scripts.reasoning.client import Answer, send
from scripts.reasoning.loads import Load, Request
from scripts.reasoning.measures import Measurement, Run, measure
from scripts.shared.comparison import GRAPH_BATCHES
from scripts.shared.models import model_config
from scripts.shared.serving import Server
from scripts.shared.systems import System
from scripts.speed.jobs import Job, Settings, Shape, make_job
from scripts.speed.serving import measure_each

WARM_UP_TOKENS = 32


def servers_of(label: str, options: Namespace) -> int:
    """Servers of a system side by side: those of two GPUs are half as many."""
    return max(1, options.servers // System.parse(label).gpus)


def job_of(label: str, options: Namespace) -> Job:
    """Each server of a system, which has its share of the streams.

    Raises:
        ValueError: there is no such model or system.
    """
    given = {k: v for k, v in vars(options).items() if k in Settings.__struct_fields__}
    longest = max(load.longest for load in options.loads)
    streams = -(-max(load.streams for load in options.loads) // servers_of(label, options))
    batches = [batch for batch in GRAPH_BATCHES if batch < streams] + [streams]
    return make_job(label, [Shape(batch, longest) for batch in batches], Settings(**given))


def run_job(
    job: Job, options: Namespace, gpus: Sequence[str], note: Callable[[Measurement], None]
) -> None:
    """Measure a system under every load, and note each measurement; a failure ends the rest."""
    loads = {load.name: load for load in options.loads}

    def measure_load(servers: Sequence[Server], job: Job, measurement: Measurement) -> None:
        urls = [server.url for server in servers]
        measurement.runs = _run(urls, loads[measurement.load], options)

    left, count = [Measurement(job.system, name) for name in loads], servers_of(job.system, options)
    measure_each(left, measure_load, note, job, gpus, options.out, count)


def _run(urls: Sequence[str], load: Load, options: Namespace) -> list[Run]:
    """Warm up with prompts of a load and short answers, and send it as often as is asked for."""
    vocabulary, runs = model_config(options.model)["vocab_size"], list[Run]()

    async def in_time(requests: Sequence[Request], note: Callable[[int], object]) -> list[Answer]:
        async with asyncio.timeout(options.load_seconds):
            return await send(urls, requests, load.streams, note)

    first = load.draw(1, vocabulary, options.seed)
    warm_up = [Request(request.prompt, WARM_UP_TOKENS) for request in first]
    asyncio.run(in_time(warm_up, lambda tokens: None))
    for repeat in range(1, options.repeats + 1):
        requests = load.draw(options.rounds, vocabulary, options.seed + repeat)
        total = sum(request.answer for request in requests)
        with tqdm(total=total, unit="tok", unit_scale=True, desc=load.name) as bar:
            busy = time.process_time()
            answers = asyncio.run(in_time(requests, bar.update))
            runs.append(measure(load, answers, time.process_time() - busy))
    return runs
