"""Serves systems one after the other, and sends them loads."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from safetensors.torch import save_file
from tqdm import tqdm

from scripts.reasoning.client import Answer, send
from scripts.reasoning.loads import Load, Request
from scripts.reasoning.measures import Measurement, Run, measure
from scripts.shared.comparison import ENVIRONMENT, GRAPH_BATCHES
from scripts.shared.machine import memory_gib
from scripts.shared.models import model_config
from scripts.shared.serving import Client, Server, ServerError
from scripts.shared.systems import System, to_flags
from scripts.speed.jobs import Job, Settings, Shape, make_job
from scripts.speed.records import explain_failure
from scripts.speed.weights import norms_for_unit_logits

START_SECONDS = 600
WARM_UP_TOKENS = 32

FAILURES = (aiohttp.ClientError, OSError, RuntimeError, ValueError)
"""How a server or a load fails; what comes late is an OSError."""


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
    job = make_job(label, [Shape(batch, longest) for batch in batches], Settings(**given))
    # Chunks would otherwise repeat all tokens before them.
    job.engine["incremental_streaming_output"] = True
    return job


def run_job(
    job: Job, options: Namespace, gpus: Sequence[str], note: Callable[[Measurement], None]
) -> None:
    """Measure a system under every load, and note each measurement; a failure ends the rest."""
    left, log = [Measurement(job.system, load.name) for load in options.loads], ""
    try:
        with _serve(job, servers_of(job.system, options), gpus) as servers:
            for load in options.loads:
                try:
                    left[0].runs = _run([server.url for server in servers], load, options)
                finally:
                    log = "\n".join(server.tail() for server in servers)
                left[0].memory_gib = memory_gib(gpus[: len(servers) * job.gpus])
                note(left.pop(0))
    except FAILURES as error:
        tqdm.write(f"{job.system}: {error}", file=sys.stderr)
        said = f"{log}\n{type(error).__name__}: {error}"
        for measurement in left:
            measurement.failure = explain_failure(said, bool(log), isinstance(error, TimeoutError))
            note(measurement)


@contextlib.contextmanager
def _serve(job: Job, count: int, gpus: Sequence[str]) -> Iterator[list[Server]]:
    """So many servers, each on GPUs of its own."""
    if count * job.gpus > len(gpus):
        raise ValueError(f"needs {count * job.gpus} GPUs, and there are {len(gpus)}")
    with contextlib.ExitStack() as held:
        servers = []
        for first in range(0, count * max(1, job.gpus), max(1, job.gpus)):
            environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
            if job.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + job.gpus])
            servers.append(Server(to_flags(job.engine), environment))
            held.callback(servers[-1].stop)
        for server in servers:
            server.wait_ready(START_SECONDS)
            if job.engine.get("load_format") == "dummy":
                spread_logits(server, model_config(job.settings.model))
        yield servers


def spread_logits(server: Client, config: dict[str, Any]) -> None:
    """Give a model of dummy weights norms by which attention prefers some tokens to others.

    Raises:
        ServerError: the server did not take them.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(norms_for_unit_logits(config)), Path(folder) / "norms.safetensors")
        body = {"model_path": folder, "load_format": "safetensors"}
        answer = server.post("/update_weights_from_disk", body)
    if answer.status_code != 200:
        raise ServerError(f"/update_weights_from_disk answers {answer.text}")


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
