"""Measures shapes on a server that runs.

Every system is measured alike: all requests of a batch stream; the first, the *witness*, reports
every token, and the others now and then, so that reporting does not become what is measured. Once
all requests decode, and are all sparse where that is asked for, the time between two tokens of the
witness is the time of a decode step of the whole batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from scripts.shared.models import model_config
from scripts.shared.serving import Client, ServerError, cache_rank_state
from scripts.shared.statistics import quantile
from scripts.shared.streaming import Answer, connect, follow
from scripts.speed import serving
from scripts.speed.serving import SEED, Job, Shape, make_prompts

REPORT_INTERVAL = 16
"""A request that is not the witness reports after so many tokens."""

SETTLE_STEPS = 20
SHAPE_SECONDS, ABORT_SECONDS = 300, 60
SECONDS_BETWEEN_LOOKS = 0.01

WINDOW, WINDOWS = 64, 3
STEPS = WINDOW * WINDOWS
"""Decode steps that are measured of a shape, in windows of consecutive ones."""


class Measurement(serving.Measurement, kw_only=True):
    """One system at one shape."""

    shape: Shape
    # Milliseconds of a step, one entry a window.
    medians: list[float] = msgspec.field(default_factory=list)
    tpot_ms: float | None = None  # median over the windows of their medians
    mean_ms: float | None = None  # mean over all measured steps
    p10_ms: float | None = None
    p90_ms: float | None = None
    prefill_seconds: float | None = None  # time until all requests have a token
    attended_tokens: float | None = None  # of a request and KV head in a step, with a cache rank
    sparse_steps: int | None = None  # steps over a working set, of the request with fewest
    exchange: dict[str, float] = msgspec.field(default_factory=dict)  # what a cache rank did


class NotMeasuredError(Exception):
    """A shape could not be measured, for a reason that a table can hold."""


class Plan(NamedTuple):
    """How far each request of a batch goes."""

    settle: int  # sparse steps, or tokens in a system without a cache rank, before measuring
    most_tokens: int  # a request ends by itself after so many tokens


def plan_batch(job: Job, shape: Shape, info: dict[str, Any]) -> Plan:
    """Decide how long a batch decodes, by `/server_info`; NotMeasuredError if it cannot."""
    threshold, longest = job.engine.get("sparse_threshold") or 0, job.engine["context_length"]
    if shape.context < threshold:
        raise NotMeasuredError(f"context is below --sparse-threshold {threshold}")
    if shape.context >= longest:
        raise NotMeasuredError(f"context is beyond the model's {longest}")
    settle, waves, shipping = SETTLE_STEPS, 1, 0
    pool_tokens, held_tokens = info["max_total_num_tokens"], cache_rank_state(info)
    covers = job.cache_rank and info["inference_kv"] == "working-set"
    if job.cache_rank:
        fill = math.ceil(info["sparse_budget"] / info["max_swap_tokens"])
        settle += info["query_window"] + fill
        # A shipped chunk grows by the token of its step.
        shipping = math.ceil(shape.context / (info["bulk_chunk_tokens"] - 1))
    if covers:
        # Prompts that do not fit together enter as earlier ones leave the pool, which takes
        # about as long again as queueing their shipment.
        waves = 2 * math.ceil(shape.batch * shape.context / pool_tokens) - 1
    most = waves * shipping + settle + STEPS + 4 * REPORT_INTERVAL
    most = min(most, longest - shape.context - 1)
    needed = shape.batch * (shape.context + most)
    if needed > pool_tokens and not covers:
        raise NotMeasuredError(f"does not fit: {needed} tokens, pool of {pool_tokens}")
    if needed > (capacity := held_tokens.get("capacity_tokens", needed)):
        raise NotMeasuredError(f"does not fit: {needed} tokens, cache rank of {capacity}")
    return Plan(settle, most)


def measure_shape(servers: Sequence[Client], job: Job, measurement: Measurement) -> None:
    """Fill in the measurement of a shape on the server of a job; see `measure_all`."""
    info = servers[0].read("/server_info")
    try:
        plan = plan_batch(job, measurement.shape, info)
        asyncio.run(_measure(servers[0], job, plan, measurement))
    except NotMeasuredError as error:
        measurement.failure = str(error).replace("|", "/")
        return
    if job.cache_rank:
        always = info["sink_tokens"] + info["recent_tokens"] + 1
        selected = min(info["sparse_budget"], measurement.shape.context - always)
        measurement.attended_tokens = always + selected


async def _measure(client: Client, job: Job, plan: Plan, measurement: Measurement) -> None:
    """Measure a shape on a running server; what the server refuses is NotMeasuredError."""
    shape, vocabulary = measurement.shape, model_config(job.model)["vocab_size"]
    prompts = make_prompts([shape.context] * shape.batch, vocabulary, f"{SEED} {shape}")
    batch = [Answer(shape.context) for _ in prompts]
    witness, tasks = batch[0], list[asyncio.Task[None]]()

    def is_settled(answer: Answer) -> bool:
        return (answer.sparse_steps if job.cache_rank else answer.written) >= plan.settle

    def situation() -> str:
        started = sum(answer.written > 0 for answer in batch)
        settled = sum(map(is_settled, batch))
        return f"{started} of {len(batch)} requests had started and {settled} were settled"

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            for task in filter(asyncio.Task.done, tasks):
                error = task.exception()
                if error and not isinstance(error, ServerError):  # the server is gone
                    raise error
                raise NotMeasuredError(f"{error or 'a request ended'}; {situation()}")
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async with connect() as session:
        try:
            async with asyncio.timeout(SHAPE_SECONDS):
                begun = time.perf_counter()
                start = await asyncio.to_thread(client.cache_rank)
                for answer, prompt in zip(batch, prompts, strict=True):
                    request = follow(
                        session,
                        client.url,
                        prompt,
                        answer,
                        max_new_tokens=plan.most_tokens,
                        stream_interval=1 if answer is witness else REPORT_INTERVAL,
                    )
                    tasks.append(asyncio.create_task(request))
                await until(lambda: all(map(is_settled, batch)))
                before = await asyncio.to_thread(client.cache_rank)
                first = witness.written + 2  # not the step that answered
                await until(lambda: witness.written >= first + STEPS)
                after = await asyncio.to_thread(client.cache_rank)
        except TimeoutError:
            raise NotMeasuredError(f"ran out of time; {situation()}") from None
        finally:
            await _abort(session, client.url, tasks)
    summarize(measurement, step_times(witness.tokens, witness.times, first, STEPS))
    measurement.prefill_seconds = max(one.times[0] for one in batch) - begun
    measurement.exchange = exchange_between(start, before, after)
    if job.cache_rank:
        measurement.sparse_steps = min(one.sparse_steps for one in batch)


async def _abort(
    session: aiohttp.ClientSession, url: str, tasks: Sequence[asyncio.Task[None]]
) -> None:
    """End all requests, and give the server time to free what they held."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_SECONDS):
            with contextlib.suppress(aiohttp.ClientError):  # it is gone, and they end as well
                await session.post(f"{url}/abort_request", json={"abort_all": True})
            await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.5)


def step_times(
    tokens: Sequence[int], times: Sequence[float], first: int, steps: int
) -> list[float]:
    """Seconds between consecutive tokens of one stream, from the arrival of token `first` on.

    `tokens` are those so far at each of `times`; tokens that came together share their time.
    """
    return np.diff(np.interp(range(first, first + steps + 1), tokens, times)).tolist()


def summarize(measurement: Measurement, seconds: Sequence[float]) -> None:
    """Fill in a measurement from the seconds of its steps."""
    milliseconds = [1e3 * value for value in seconds]
    measurement.medians = np.median(np.reshape(milliseconds, (WINDOWS, -1)), axis=1).tolist()
    measurement.tpot_ms = statistics.median(measurement.medians)
    measurement.mean_ms = statistics.fmean(milliseconds)
    measurement.p10_ms = quantile(milliseconds, 0.1)
    measurement.p90_ms = quantile(milliseconds, 0.9)


def exchange_between(
    start: dict[str, Any], before: dict[str, Any], after: dict[str, Any]
) -> dict[str, float]:
    """What the exchange did between two states of the inference rank; nothing without a cache rank.

    `start` is the state when the shape began.
    """

    def grown(name: str, since: dict[str, Any] = before) -> float:
        return float(after.get(name, 0)) - float(since.get(name, 0))

    if not after:
        return {}
    steps = max(1.0, grown("steps"))
    return {
        "late steps %": 100 * grown("steps_waited") / steps,
        "wait ms": 1e3 * grown("wait_seconds") / steps,
        "up MB/step": 1e-6 * grown("up_bytes") / steps,
        "down MB/step": 1e-6 * grown("down_bytes") / steps,
        "bulk GB": 1e-9 * grown("bulk_bytes", start),
    }
