"""Measures shapes on an engine that runs.

Every system is measured alike: all requests of a batch stream; the first, the *witness*, reports
every token, and the others now and then, so that reporting does not become what is measured. Once
all requests decode, and are all sparse where that is asked for, the time between two tokens of the
witness is the time of a decode step of the whole batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from scripts.speed.jobs import Job, Shape, unmeasurable
from scripts.speed.records import Arrival, Measurement, step_times, summarize, wire_between

REPORT_INTERVAL = 16
"""A request that is not the witness reports after so many tokens."""

SETTLE_STEPS = 20
ABORT_SECONDS = 60


class NotMeasuredError(Exception):
    """A shape could not be measured, for a reason that a table can hold."""


@dataclasses.dataclass
class Stream:
    """What one request has reported so far.

    Attributes:
        arrivals: (tokens so far, when) of every report.
        statistics: the cache rank's, from the latest response.
    """

    arrivals: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    statistics: dict[str, int] = dataclasses.field(default_factory=dict)
    ended: str = ""

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][0] if self.arrivals else 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """How far each request of a batch goes.

    Attributes:
        settle: sparse steps (or tokens, in a system without a cache rank) before measuring.
        steps: steps that are measured.
        most_tokens: a request ends by itself after so many tokens.
    """

    settle: int
    steps: int
    most_tokens: int


def plan_batch(
    job: Job, shape: Shape, arguments: Any, pool_tokens: int, cache_rank_tokens: int | None
) -> Plan:
    """Decide how long a batch decodes.

    Args:
        arguments: the engine's, with defaults filled in.
        pool_tokens: tokens that the inference rank's pool holds.
        cache_rank_tokens: tokens that the cache rank holds, if there is one and it says.

    Raises:
        NotMeasuredError: it cannot fit.
    """
    settings = job.settings
    settle, waves, shipping = SETTLE_STEPS, 1, 0
    if job.cache_rank:
        fill = math.ceil(arguments.sparse_budget / arguments.delta_capacity)
        settle += arguments.query_window + fill
        # A shipped chunk grows by the token of its step.
        shipping = math.ceil(shape.context / (arguments.bulk_chunk_tokens - 1))
        if arguments.inference_kv == "working-set":
            # Prompts that do not fit together enter as earlier ones leave the pool, which takes
            # about as long again as queueing their shipment.
            waves = 2 * math.ceil(shape.batch * shape.context / pool_tokens) - 1
    if settings.skip_steps is not None:
        settle = settings.skip_steps
    steps = settings.repeats * settings.window
    most = waves * shipping + settle + steps + 4 * REPORT_INTERVAL
    if job.measures_arrival:
        most += shipping + settle + 4 * REPORT_INTERVAL
    most = min(most, job.engine["context_length"] - shape.context - 1)
    needed = (shape.batch + job.measures_arrival) * (shape.context + most)
    covers = job.cache_rank and arguments.inference_kv == "working-set"
    if needed > pool_tokens and not covers:
        raise NotMeasuredError(f"does not fit: {needed} tokens, pool of {pool_tokens}")
    if cache_rank_tokens is not None and needed > cache_rank_tokens:
        raise NotMeasuredError(f"does not fit: {needed} tokens, cache rank of {cache_rank_tokens}")
    return Plan(settle, steps, most)


def make_prompts(shape: Shape, vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens, the same for the same shape and seed."""
    generator = random.Random(f"{seed} {shape}")
    low = min(256, vocabulary // 2)  # leave out special tokens of small vocabularies
    return [generator.choices(range(low, vocabulary), k=shape.context) for _ in range(shape.batch)]


def arrival_of(witness: Stream, arriving: Stream) -> Arrival:
    """Steps of the witness between the first and the last report of the one that arrived."""
    begun, ended = arriving.arrivals[0][1], arriving.arrivals[-1][1]
    steps = [
        1e3 * (now - then) / (more - tokens)
        for (tokens, then), (more, now) in itertools.pairwise(witness.arrivals)
        if begun <= then and now <= ended
    ]
    return Arrival(len(steps), statistics.median(steps), max(steps))


def progress_of(stream: Stream, cache_rank: bool) -> int:
    """Steps that a request has made in the state that is measured."""
    return stream.statistics.get("sparse_steps", 0) if cache_rank else stream.tokens


class Bench:
    """Measures shapes on a running engine."""

    def __init__(self, engine: Any, job: Job) -> None:
        self._engine, self._job = engine, job
        self._manager = engine.tokenizer_manager
        self._arguments = self._manager.server_args
        info = engine.get_server_info()
        self.pool_tokens = int(info["max_total_num_tokens"])
        state = info["internal_states"][0].get("cache_rank", {})
        self.cache_rank_tokens: int | None = state.get("capacity_tokens")

    def measure(self, shape: Shape) -> Measurement:
        """Measure one shape; a failure becomes a field."""
        measurement = Measurement(self._job.model, self._job.system, shape, started=time.time())
        try:
            reason = unmeasurable(self._job, shape)
            if reason:
                raise NotMeasuredError(reason)
            plan = plan_batch(
                self._job, shape, self._arguments, self.pool_tokens, self.cache_rank_tokens
            )
            self._engine.loop.run_until_complete(self._measure(measurement, plan))
        except NotMeasuredError as error:
            measurement.failure = str(error)
        measurement.ended = time.time()
        return measurement

    async def _measure(self, measurement: Measurement, plan: Plan) -> None:
        shape, cache_rank = measurement.shape, self._job.cache_rank
        vocabulary, seed = self._job.vocabulary, self._job.settings.seed
        prompts = make_prompts(shape, vocabulary, seed)
        streams = [Stream() for _ in prompts]
        changed = asyncio.Event()
        begun = time.perf_counter()
        start = await self._state()
        tasks = [
            asyncio.create_task(
                self._follow(
                    stream, prompt, plan.most_tokens, 1 if i == 0 else REPORT_INTERVAL, changed
                )
            )
            for i, (stream, prompt) in enumerate(zip(streams, prompts, strict=True))
        ]

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                ended = next((stream.ended for stream in streams if stream.ended), None)
                if ended:
                    raise NotMeasuredError(f"{ended}; {self._situation(streams, plan)}")
                changed.clear()
                await changed.wait()

        witness = streams[0]
        try:
            async with asyncio.timeout(self._job.settings.shape_seconds):
                await until(
                    lambda: (
                        min(progress_of(stream, cache_rank) for stream in streams) >= plan.settle
                    )
                )
                before = await self._state()
                first = witness.tokens + 2  # not the step that answered
                await until(lambda: witness.tokens >= first + plan.steps)
                after = await self._state()
                if self._job.measures_arrival:
                    (prompt,) = make_prompts(Shape(1, shape.context), vocabulary, seed)
                    arriving = Stream()
                    following = self._follow(arriving, prompt, plan.most_tokens, 1, changed)
                    tasks.append(asyncio.create_task(following))
                    streams.append(arriving)
                    await until(lambda: progress_of(arriving, cache_rank) > 0)
                    measurement.arrival = arrival_of(witness, arriving)
        except TimeoutError:
            raise NotMeasuredError(f"ran out of time; {self._situation(streams, plan)}") from None
        finally:
            await self._abort(tasks)
        seconds = step_times(witness.arrivals, first, plan.steps)
        summarize(measurement, seconds, self._job.settings.window)
        measurement.prefill_seconds = max(stream.arrivals[0][1] for stream in streams) - begun
        measurement.wire = wire_between(start, before, after)
        if cache_rank:
            batch = streams[: shape.batch]  # without one that arrived
            measurement.sparse_steps = min(s.statistics["sparse_steps"] for s in batch)
            measurement.late_steps = max(s.statistics.get("late_steps", 0) for s in batch)
        measurement.attended_tokens = self._attended(shape, first + plan.steps / 2)

    async def _follow(
        self,
        stream: Stream,
        prompt: list[int],
        most_tokens: int,
        interval: int,
        changed: asyncio.Event,
    ) -> None:
        parameters = {
            "max_new_tokens": most_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream_interval": interval,
        }
        try:
            outputs = await self._engine.async_generate(
                input_ids=prompt, sampling_params=parameters, stream=True
            )
            async for output in outputs:
                meta = output["meta_info"]
                tokens = int(meta["completion_tokens"])
                if tokens > stream.tokens:
                    stream.arrivals.append((tokens, time.perf_counter()))
                stream.statistics = meta.get("cache_rank") or stream.statistics
                changed.set()
            stream.ended = f"a request ended after {stream.tokens} tokens"
        except Exception as error:  # the engine's complaints are of many types
            stream.ended = f"{type(error).__name__}: {error}"
        changed.set()

    async def _abort(self, tasks: list[asyncio.Task[None]]) -> None:
        """End all requests, and give the engine time to free what they held."""
        self._manager.abort_request(abort_all=True)
        _, pending = await asyncio.wait(tasks, timeout=ABORT_SECONDS)
        for task in pending:
            task.cancel()
        await asyncio.sleep(0.5)

    async def _state(self) -> dict[str, Any]:
        """The state of the inference rank; empty without a cache rank."""
        states = await self._manager.get_internal_state()
        state: dict[str, Any] = states[0].get("cache_rank") or {}
        return state

    def _situation(self, streams: list[Stream], plan: Plan) -> str:
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
        if "decode_mode" in self._job.engine:
            return None
        return shape.context + generated
