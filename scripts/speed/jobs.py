"""What `profile_tpot` can run: shapes, settings, and the engine of each job.

A job is one engine and every shape it measures: starting an engine costs a minute or two, a shape
costs seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from scripts.shared.models import BUNDLED, folder_of, model_config
from scripts.shared.systems import System

ROOM_FOR_OUTPUT = 4096
"""A sequence may grow by so many tokens while its prompt is shipped, settles and is measured."""

TRACE_STEPS = 640
"""Tracing begins with the first sparse request of an engine; this reaches the measured steps."""

PORTS = 200
"""Each job has so many ports for itself."""

CAPACITY_BATCHES = (8, 16, 24, 32, 48, 64)


class Shape(msgspec.Struct, frozen=True, order=True):
    """A batch of sequences of `context` tokens each, before the first generated token."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `8x32768`.

        Raises:
            ValueError: it is not two positive numbers.
        """
        try:
            batch, context = (int(part) for part in text.lower().split("x"))
        except ValueError:
            raise ValueError(
                f"{text!r} is not a shape: write BATCHxCONTEXT, as in 8x32768"
            ) from None
        if batch < 1 or context < 1:
            raise ValueError(f"{text!r}: batch and context must be at least 1")
        return cls(batch, context)

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"

    @property
    def title(self) -> str:
        """The shape in tables and plots."""
        return f"{self.batch} × {self.context}"


class Wish(NamedTuple):
    """One model, one system, and the shapes to measure."""

    model: str
    system: str
    shapes: tuple[Shape, ...]


class Settings(msgspec.Struct):
    """How every job is run."""

    sparse_budget: int = 2048  # k
    sparse_threshold: int = 4096  # context from which the sparse systems are sparse
    repeats: int = 3  # windows of decode steps that are measured
    window: int = 64  # decode steps of a window
    skip_steps: int | None = None  # steps before the first window; None is as many as needed
    seed: int = 1  # seed of the prompts
    shape_seconds: float = 300.0  # deadline of a shape
    capacity: int = 0  # context whose largest fitting batch is searched for too; 0 is none
    memory_fraction: float = 0.85  # share of a GPU for weights and KV pool
    engine: dict[str, Any] = {}  # further engine arguments of every system
    trace: bool = False  # systems with a cache rank write a trace
    arrival: bool = False  # also measure the steps while one more request comes to a cache rank

    @property
    def steps(self) -> int:
        """Decode steps that are measured of a shape."""
        return self.repeats * self.window


class Job(msgspec.Struct):
    """What a worker process is given, or several that share its batches."""

    model: str
    system: str
    gpus: int  # GPUs that it needs
    cache_rank: bool
    engine: dict[str, Any]  # arguments of an engine, or those of a cache rank alone
    shapes: list[Shape]  # shapes as they are run
    vocabulary: int
    settings: Settings
    capacity: int = 0  # context whose largest fitting batch is searched for; 0 is none
    trace: str = ""  # file of the cache rank's trace; empty for none
    cache_step: bool = False  # measure the cache rank's step alone
    servers: int = 1  # engines at the same time, each with its part of a batch and of the GPUs
    part: int = 0  # which of several servers it is, from 1 on; 0 is all of them

    @property
    def measures_arrival(self) -> bool:
        """Whether one more request comes when a batch has been measured."""
        return self.cache_rank and self.settings.arrival

    @property
    def name(self) -> str:
        """The job's name, usable as a file name."""
        text = f"{Path(self.model).name}-{self.system}" + (f"-{self.part}" if self.part else "")
        return "".join(c if c.isalnum() or c in "-._=" else "-" for c in text)


def divide(job: Job) -> list[Job]:
    """A job for each of its servers: an equal part of every batch, and ports of its own.

    Raises:
        ValueError: a batch cannot be divided, or its largest is asked for.
    """
    count = job.servers
    if job.capacity or any(shape.batch % count for shape in job.shapes):
        raise ValueError(f"{job.system}: {count} servers need batches that are multiples of that")
    shapes = [Shape(shape.batch // count, shape.context) for shape in job.shapes]
    parts = []
    for part in range(1, count + 1):
        engine = dict(job.engine)
        if "port" in engine:
            engine["port"] += PORTS // count * (part - 1)
        parts.append(
            msgspec.structs.replace(
                job, gpus=job.gpus // count, shapes=shapes, servers=1, part=part, engine=engine
            )
        )
    return parts


def make_job(wish: Wish, settings: Settings, out: Path) -> Job:
    """The engine of a wish, and its shapes as run.

    Raises:
        ValueError: there is no such model or system.
    """
    system, config = System.parse(wish.system), model_config(wish.model)
    changes = system.server_changes
    shapes, capacity = list(wish.shapes), settings.capacity
    job = Job(
        wish.model,
        wish.system,
        gpus=0 if wish.model == BUNDLED else system.gpus,
        cache_rank=system.has_cache_rank,
        engine={"sparse_budget": settings.sparse_budget, **changes},
        shapes=shapes,
        vocabulary=config["vocab_size"],
        settings=settings,
        cache_step=not system.is_server,
        servers=system.servers,
    )
    if job.cache_step:
        return job
    if system.at_budget:
        if capacity:  # which batch will fit is not known yet
            shapes += [Shape(batch, capacity) for batch in CAPACITY_BATCHES]
        budget = changes.pop("sparse_budget", settings.sparse_budget)
        shapes, capacity = sorted({Shape(shape.batch, budget) for shape in shapes}), 0
    batches = {shape.batch // system.servers for shape in shapes}
    batches |= set(CAPACITY_BATCHES if capacity else ())
    if job.measures_arrival:
        batches |= {shape.batch + 1 for shape in shapes}
    longest = max([capacity, *(shape.context for shape in shapes)])
    arguments = _engine_arguments(wish.model, config, settings, batches, longest)
    if system.is_sparse:
        arguments["sparse_budget"] = settings.sparse_budget
        arguments["sparse_threshold"] = settings.sparse_threshold
    if system.has_cache_rank:
        arguments["max_sparse_requests"] = max(batches)
    job.shapes, job.capacity = shapes, capacity
    job.engine = arguments | system.arguments | settings.engine | changes
    if settings.trace and system.has_cache_rank:
        job.trace = str((out / "traces" / f"{job.name}.json").resolve())
        job.engine = {"trace_steps": TRACE_STEPS, **job.engine, "trace": job.trace}
    return job


def _engine_arguments(
    model: str, config: dict[str, Any], settings: Settings, batches: set[int], longest: int
) -> dict[str, Any]:
    """The arguments that the engines of all systems share."""
    length, trained = longest + ROOM_FOR_OUTPUT, config["max_position_embeddings"]
    arguments: dict[str, Any] = {
        "model_path": str(folder_of(model).resolve()),
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "context_length": length,
        # SGLang counts a request twice while its prompt is computed in chunks, and would leave the
        # last one of the batch in the queue.
        "max_running_requests": max(batches) + 1,
        "chunked_prefill_size": 8192,
        "stream_interval": 1,
        "log_level": "info",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    if model == BUNDLED:
        return arguments | {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "max_total_tokens": 40000,
            "context_length": min(length, trained),
            "sleep_on_idle": True,
        }
    if length > trained:
        # The rotary table is as long as the model says that it was trained for.
        override = {"max_position_embeddings": length}
        arguments["json_model_override_args"] = json.dumps(override)
    return arguments | {
        "load_format": "dummy",
        "random_seed": settings.seed,
        "attention_backend": "fa3",
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_bs_decode": sorted(batches),
        "mem_fraction_static": settings.memory_fraction,
    }
