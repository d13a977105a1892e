"""Measures shapes on an engine that runs.

Every system is measured alike: all requests of a batch stream; the first, the *witness*, reports
every token, and the others now and then, so that reporting does not become what is measured. Once
all requests decode, and are all sparse where that is asked for, the time between two tokens of the
witness is the time of a decode step of the whole batch.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    ended: str = ""  # why it is over

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][0] if self.arrivals else 0


class Plan(NamedTuple):
    """How far each request of a batch goes."""

    settle: int  # sparse steps, or tokens in a system without a cache rank, before measuring
    most_tokens: int  # a request ends by itself after so many tokens


def unmeasurable(job: Job, shape: Shape) -> str:
    """Why a shape makes no sense for the engine of a job, or nothing."""
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
        arguments: the engine's, with defaults filled in.
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


class Bench:
    """Measures shapes on a running engine.

    Attributes:
        pool_tokens: tokens that the inference rank's pool holds.
        cache_rank_tokens: tokens that the cache rank holds, if there is one and it says.
    """

    def __init__(self, engine: Any, job: Job) -> None:
        self._engine, self._job = engine, job
        self._manager = engine.tokenizer_manager
        self._arguments = self._manager.server_args
        info = engine.get_server_info()
        self.pool_tokens = int(info["max_total_num_tokens"])
        state = info["internal_states"][0].get("cache_rank", {})
        self.cache_rank_tokens: int | None = state.get("capacity_tokens")

    def measure(self, measurement: Measurement) -> None:
        """Fill in the measurement of a shape; a failure becomes a field."""
        capacities = self.pool_tokens, self.cache_rank_tokens
        try:
            plan = plan_batch(self._job, measurement.shape, self._arguments, *capacities)
            self._engine.loop.run_until_complete(self._measure(measurement, plan))
        except NotMeasuredError as error:
            measurement.failure = str(error)
        measurement.ended = time.time()

    async def _measure(self, measurement: Measurement, plan: Plan) -> None:
        shape, settings, cache_rank = measurement.shape, self._job.settings, self._job.cache_rank
        changed = asyncio.Event()
        streams: list[Stream] = []
        tasks: list[asyncio.Task[None]] = []

        def send(prompt: list[int], report_interval: int) -> Stream:
            streams.append(stream := Stream())
            follow = self._follow(stream, prompt, plan.most_tokens, report_interval, changed)
            tasks.append(asyncio.create_task(follow))
            return stream

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                if ended := next((stream.ended for stream in streams if stream.ended), ""):
                    raise NotMeasuredError(f"{ended}; {self._situation(streams, plan)}")
                changed.clear()
                await changed.wait()

        lengths, seed = [shape.context] * shape.batch, f"{settings.seed} {shape}"
        first_prompt, *prompts = make_prompts(lengths, self._job.vocabulary, seed)
        begun = time.perf_counter()
        start = await self._state()
        witness = send(first_prompt, 1)
        batch = [witness, *(send(prompt, REPORT_INTERVAL) for prompt in prompts)]
        try:
            async with asyncio.timeout(settings.shape_seconds):
                await until(lambda: min(progress_of(s, cache_rank) for s in batch) >= plan.settle)
                before = await self._state()
                first = witness.tokens + 2  # not the step that answered
                await until(lambda: witness.tokens >= first + settings.steps)
                after = await self._state()
        except TimeoutError:
            raise NotMeasuredError(f"ran out of time; {self._situation(streams, plan)}") from None
        finally:
            await self._abort(tasks)
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
        stream: Stream,
        prompt: list[int],
        most_tokens: int,
        report_interval: int,
        changed: asyncio.Event,
    ) -> None:
        """Decode one request, and note what it reports."""
        parameters = {
            "max_new_tokens": most_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream_interval": report_interval,
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
        return None if "decode_mode" in self._job.engine else shape.context + generated
