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
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp

from scripts.shared.serving import Client, ServerError, cache_rank_state
from scripts.shared.streaming import chunks_of, connect
from scripts.speed.jobs import Job, Shape
from scripts.speed.records import Measurement, step_times, summarize, wire_between
from sglang_ext.flags import SPARSE_THRESHOLD

REPORT_INTERVAL = 16
"""A request that is not the witness reports after so many tokens."""

SETTLE_STEPS = 20
ABORT_SECONDS = 60


class NotMeasuredError(Exception):
    """A shape could not be measured, for a reason that a table can hold."""


@dataclass
class Stream:
    """What one request has reported so far."""

    arrivals: list[tuple[int, float]] = field(default_factory=list)  # (tokens so far, when)
    statistics: dict[str, int] = field(default_factory=dict)  # the cache rank's, in the last report
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # is set by every report

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][0] if self.arrivals else 0


class Plan(NamedTuple):
    """How far each request of a batch goes."""

    settle: int  # sparse steps, or tokens in a system without a cache rank, before measuring
    most_tokens: int  # a request ends by itself after so many tokens


def unmeasurable(job: Job, shape: Shape) -> str:
    """Why a shape makes no sense for the server of a job, or nothing."""
    threshold, longest = job.engine.get("sparse_threshold"), job.engine["context_length"]
    if threshold is None:
        threshold = SPARSE_THRESHOLD if job.cache_rank else 0
    if shape.context < threshold:
        return f"context is below --sparse-threshold {threshold}"
    return f"context is beyond the model's {longest}" if shape.context >= longest else ""


def plan_batch(
    job: Job, shape: Shape, arguments: Any, pool_tokens: int, cache_rank_tokens: int | None
) -> Plan:
    """Decide how long a batch decodes.

    Args:
        job: names the settings.
        shape: the batch.
        arguments: the server's, with defaults filled in.
        pool_tokens: tokens that the inference rank's pool holds.
        cache_rank_tokens: tokens that the cache rank holds, if there is one and it says.

    Raises:
        NotMeasuredError: it makes no sense, or cannot fit.
    """
    if reason := unmeasurable(job, shape):
        raise NotMeasuredError(reason)
    settle, waves, shipping = SETTLE_STEPS, 1, 0
    covers = job.cache_rank and arguments.inference_kv == "working-set"
    if job.cache_rank:
        fill = math.ceil(arguments.sparse_budget / arguments.max_swap_tokens)
        settle += arguments.query_window + fill
        # A shipped chunk grows by the token of its step.
        shipping = math.ceil(shape.context / (arguments.bulk_chunk_tokens - 1))
    if covers:
        # Prompts that do not fit together enter as earlier ones leave the pool, which takes
        # about as long again as queueing their shipment.
        waves = 2 * math.ceil(shape.batch * shape.context / pool_tokens) - 1
    if job.settings.skip_steps is not None:
        settle = job.settings.skip_steps
    most = waves * shipping + settle + job.settings.steps + 4 * REPORT_INTERVAL
    most = min(most, job.engine["context_length"] - shape.context - 1)
    needed = shape.batch * (shape.context + most)
    if needed > pool_tokens and not covers:
        raise NotMeasuredError(f"does not fit: {needed} tokens, pool of {pool_tokens}")
    if cache_rank_tokens is not None and needed > cache_rank_tokens:
        raise NotMeasuredError(f"does not fit: {needed} tokens, cache rank of {cache_rank_tokens}")
    return Plan(settle, most)


def make_prompts(lengths: Sequence[int], vocabulary: int, seed: object) -> list[list[int]]:
    """Random tokens, the same for the same lengths and seed."""
    generator = random.Random(f"{seed}")
    low = min(256, vocabulary // 2)  # leave out special tokens of small vocabularies
    return [generator.choices(range(low, vocabulary), k=length) for length in lengths]


def progress_of(stream: Stream, cache_rank: bool) -> int:
    """Steps that a request has made in the state that is measured."""
    return stream.statistics.get("sparse_steps", 0) if cache_rank else stream.tokens


def measure_shape(servers: Sequence[Client], job: Job, measurement: Measurement) -> None:
    """Fill in the measurement of a shape on the server of a job; see `measure_each`."""
    (client,) = servers
    info = client.read("/server_info")
    pool_tokens = int(info["max_total_num_tokens"])
    cache_rank_tokens = cache_rank_state(info).get("capacity_tokens")
    arguments = SimpleNamespace(**info)
    try:
        plan = plan_batch(job, measurement.shape, arguments, pool_tokens, cache_rank_tokens)
        asyncio.run(_Bench(client.url, job, arguments).measure(measurement, plan))
    except NotMeasuredError as error:
        measurement.failure = str(error)


class _Bench:
    """Measures a shape on a running server; what the server refuses is NotMeasuredError."""

    def __init__(self, url: str, job: Job, arguments: Any) -> None:
        self._url, self._job, self._arguments = url, job, arguments

    async def measure(self, measurement: Measurement, plan: Plan) -> None:
        shape, settings, cache_rank = measurement.shape, self._job.settings, self._job.cache_rank
        lengths, seed = [shape.context] * shape.batch, f"{settings.seed} {shape}"
        prompts = make_prompts(lengths, self._job.vocabulary, seed)
        changed = asyncio.Event()
        batch = [Stream(changed=changed) for _ in prompts]
        witness = batch[0]
        tasks: list[asyncio.Task[None]] = []

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                for task in tasks:
                    if task.done():
                        raise NotMeasuredError(f"{_ending(task)}; {self._situation(batch, plan)}")
                changed.clear()
                await changed.wait()

        def is_settled() -> bool:
            return min(progress_of(stream, cache_rank) for stream in batch) >= plan.settle

        async with connect() as session:
            try:
                async with asyncio.timeout(settings.shape_seconds):
                    begun = time.perf_counter()
                    start = await self._state(session)
                    for stream, prompt in zip(batch, prompts, strict=True):
                        interval = 1 if stream is witness else REPORT_INTERVAL
                        follow = self._follow(session, stream, prompt, plan.most_tokens, interval)
                        tasks.append(asyncio.create_task(follow))
                        tasks[-1].add_done_callback(lambda _: changed.set())
                    await until(is_settled)
                    before = await self._state(session)
                    first = witness.tokens + 2  # not the step that answered
                    await until(lambda: witness.tokens >= first + settings.steps)
                    after = await self._state(session)
            except TimeoutError:
                situation = self._situation(batch, plan)
                raise NotMeasuredError(f"ran out of time; {situation}") from None
            finally:
                await self._abort(session, tasks)
        seconds = step_times(witness.arrivals, first, settings.steps)
        summarize(measurement, seconds, settings.window)
        measurement.prefill_seconds = max(stream.arrivals[0][1] for stream in batch) - begun
        measurement.wire = wire_between(start, before, after)
        if cache_rank:
            measurement.sparse_steps = min(s.statistics["sparse_steps"] for s in batch)
            measurement.late_steps = max(s.statistics.get("late_steps", 0) for s in batch)
        measurement.attended_tokens = self._attended(shape, first + settings.steps / 2)

    async def _follow(
        self,
        session: aiohttp.ClientSession,
        stream: Stream,
        prompt: list[int],
        most_tokens: int,
        report_interval: int,
    ) -> None:
        """Decode one request, and note what it reports."""
        parameters = {
            "max_new_tokens": most_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream_interval": report_interval,
        }
        body = {"input_ids": prompt, "sampling_params": parameters}
        async for chunk in chunks_of(session, self._url, body):
            meta = chunk["meta_info"]
            tokens = int(meta["completion_tokens"])
            if tokens > stream.tokens:
                stream.arrivals.append((tokens, time.perf_counter()))
            stream.statistics = meta.get("cache_rank") or stream.statistics
            stream.changed.set()

    async def _abort(
        self, session: aiohttp.ClientSession, tasks: Sequence[asyncio.Task[None]]
    ) -> None:
        """End all requests, and give the server time to free what they held."""
        url = f"{self._url}/abort_request"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                with contextlib.suppress(aiohttp.ClientError):  # it is gone, and they end as well
                    await session.post(url, json={"abort_all": True})
                await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.5)

    async def _state(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """The state of the inference rank; empty without a cache rank."""
        async with session.get(f"{self._url}/server_info") as response:
            return cache_rank_state(await response.json())

    def _situation(self, streams: Sequence[Stream], plan: Plan) -> str:
        settled = sum(progress_of(s, self._job.cache_rank) >= plan.settle for s in streams)
        started = sum(stream.tokens > 0 for stream in streams)
        return (
            f"{started} of {len(streams)} requests had started and {settled} were settled, the "
            f"first had {streams[0].tokens} tokens"
        )

    def _attended(self, shape: Shape, generated: float) -> float | None:
        """Tokens that a request attends to in a measured step, on average."""
        arguments = self._arguments
        if self._job.cache_rank:
            always = arguments.sink_tokens + arguments.recent_tokens + 1
            return always + min(arguments.sparse_budget, shape.context - always)
        return None if "decode_mode" in self._job.engine else shape.context + generated


def _ending(task: asyncio.Task[None]) -> str:
    """How a request ended before its time.

    Raises:
        aiohttp.ClientError: the server is gone.
    """
    try:
        task.result()
    except ServerError as error:
        return str(error)
    return "a request ended"
