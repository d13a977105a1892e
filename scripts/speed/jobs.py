"""What can be profiled: shapes, settings, and the server of each job.

A job is one server and every shape it measures: starting a server costs a minute or two, a shape
costs seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripts.shared.command import explained
from scripts.shared.models import BUNDLED, folder_of, model_config
from scripts.shared.systems import SYSTEMS, System

ROOM_FOR_OUTPUT = 4096
"""A sequence may grow by so many tokens while its prompt is shipped, settles and is measured."""


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


class Settings(msgspec.Struct):
    """How every job is run."""

    model: str = "qwen3-8b"  # as of scripts.shared.models
    sparse_budget: int | None = 2048  # k; None is what each server chooses
    sparse_threshold: int | None = None  # None is what each server chooses
    repeats: int = 3  # windows of decode steps that are measured
    window: int = 64  # decode steps of a window
    skip_steps: int | None = None  # steps before the first window; None is as many as needed
    seed: int = 1  # seed of the prompts
    shape_seconds: float = 300.0  # deadline of a shape
    memory_fraction: float = 0.85  # share of a GPU for weights and KV pool
    engine: dict[str, Any] = {}  # further engine arguments of every system

    @property
    def steps(self) -> int:
        """Decode steps that are measured of a shape."""
        return self.repeats * self.window


def add_engine_options(parser: argparse.ArgumentParser, budget: int | None) -> None:
    """Add the options of engines, which Settings has as well, of systems, and of the results.

    Args:
        parser: of a script.
        budget: the default of --sparse-budget; None leaves it to each server.
    """
    add = parser.add_argument
    add("--model", "--model-path", default="qwen3-8b",
        help="a name in scripts/speed/model_shapes, `bundled`, or a folder")  # fmt: skip
    add("--systems", nargs="+", required=True,
        help=f"NAME[:ARGUMENT=VALUE,...] of {', '.join(SYSTEMS)}")  # fmt: skip
    add("--sparse-budget", type=int, default=budget,
        help=f"of sparse systems; default: {budget or 'what each server chooses'}")  # fmt: skip
    add("--sparse-threshold", type=int, help="default: what each server chooses")
    add("--seed", type=int, default=1)
    add("--memory-fraction", type=float, default=0.85, help="of a GPU, for weights and KV pool")
    add("--engine-args", dest="engine", metavar="ENGINE_ARGS", type=explained(json.loads),
        default={}, help="JSON object of engine arguments")  # fmt: skip
    add("--out", type=Path, default=Path("results"))


class Job(msgspec.Struct):
    """One server and the shapes that it measures."""

    system: str
    gpus: int  # GPUs that it needs
    cache_rank: bool
    engine: dict[str, Any]  # arguments of the server
    shapes: list[Shape]  # shapes as they are run
    vocabulary: int
    settings: Settings

    @property
    def name(self) -> str:
        """The job's name, usable as a file name."""
        text = f"{Path(self.settings.model).name}-{self.system}"
        return "".join(c if c.isalnum() or c in "-._=" else "-" for c in text)


def make_job(label: str, shapes: Sequence[Shape], settings: Settings) -> Job:
    """The engine of a system, and its shapes as run.

    Raises:
        ValueError: there is no such model or system.
    """
    system, config = System.parse(label), model_config(settings.model)
    changes = system.server_changes
    if system.at_budget:
        budget = changes.pop("sparse_budget", settings.sparse_budget)
        shapes = sorted({Shape(shape.batch, budget) for shape in shapes})
    batches = {shape.batch for shape in shapes}
    longest = max(shape.context for shape in shapes)
    arguments = _engine_arguments(config, settings, batches, longest)
    if system.is_sparse:
        arguments["sparse_budget"] = settings.sparse_budget
        arguments["sparse_threshold"] = settings.sparse_threshold
    if system.has_cache_rank:
        arguments["max_sparse_requests"] = max(batches)
    return Job(
        label,
        gpus=0 if settings.model == BUNDLED else system.gpus,
        cache_rank=system.has_cache_rank,
        engine=arguments | system.arguments | settings.engine | changes,
        shapes=list(shapes),
        vocabulary=config["vocab_size"],
        settings=settings,
    )


def _engine_arguments(
    config: dict[str, Any], settings: Settings, batches: set[int], longest: int
) -> dict[str, Any]:
    """The arguments that the engines of all systems share."""
    length, trained = longest + ROOM_FOR_OUTPUT, config["max_position_embeddings"]
    arguments: dict[str, Any] = {
        "model_path": str(folder_of(settings.model).resolve()),
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "context_length": length,
        # SGLang counts a request twice while its prompt is computed in chunks, and would leave the
        # last one of the batch in the queue.
        "max_running_requests": max(batches) + 1,
        "chunked_prefill_size": 8192,
        "stream_interval": 1,
        # Chunks would otherwise repeat all tokens before them.
        "incremental_streaming_output": True,
        "log_level": "info",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    if settings.model == BUNDLED:
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
