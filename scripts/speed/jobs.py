"""What can be profiled: shapes, and the servers of each system.

A job is one server and all that is measured on it: starting a server costs a minute or two, a shape
costs seconds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripts.shared.command import explained
from scripts.shared.models import BUNDLED, folder_of, model_config
from scripts.shared.systems import SYSTEMS, System

ROOM_FOR_OUTPUT = 4096
"""A sequence may grow by so many tokens while its prompt is shipped, settles and is measured."""

SEED = 1


class Shape(msgspec.Struct, frozen=True, order=True):
    """A batch of sequences of `context` tokens each, before the first generated token."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `8x32768`; ValueError if it is not of this form."""
        batch, _, context = text.partition("x")
        if not (batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
            raise ValueError(f"{text!r} is not a shape: write BATCHxCONTEXT, as in 8x32768")
        return cls(int(batch), int(context))


def add_engine_options(parser: argparse.ArgumentParser, budget: int | None) -> None:
    """Add the options of engines, systems and results; a budget of None is left to servers."""
    add = parser.add_argument
    add("--model", "--model-path", default="qwen3-8b",
        help="a name in scripts/speed/model_shapes, `bundled`, or a folder")  # fmt: skip
    add("--systems", nargs="+", required=True,
        help=f"NAME[:ARGUMENT=VALUE,...] of {', '.join(SYSTEMS)}")  # fmt: skip
    add("--sparse-budget", type=int, default=budget,
        help=f"of sparse systems; default: {budget or 'what each server chooses'}")  # fmt: skip
    add("--sparse-threshold", type=int, help="default: what each server chooses")
    add("--engine-args", dest="engine", metavar="ENGINE_ARGS", type=explained(json.loads),
        default={}, help="JSON object of engine arguments")  # fmt: skip
    add("--out", type=Path, default=Path("results"))


class Job(msgspec.Struct):
    """One server, or several alike side by side, and the shapes that it measures."""

    system: str
    model: str
    gpus: int  # GPUs that each server needs
    cache_rank: bool
    engine: dict[str, Any]  # arguments of the server
    shapes: list[Shape]  # shapes as they are run
    servers: int = 1


def make_job(
    label: str, shapes: Sequence[Shape], options: argparse.Namespace, servers: int = 1
) -> Job:
    """The engine of a system, and its shapes as run; ValueError if there is no such system."""
    system, config = System.parse(label), model_config(options.model)
    changes = dict(system.changes)
    if system.at_budget:
        budget = changes.pop("sparse_budget", options.sparse_budget)
        shapes = sorted({Shape(shape.batch, budget) for shape in shapes})
    batches = {shape.batch for shape in shapes}
    longest = max(shape.context for shape in shapes)
    arguments = _engine_arguments(config, options.model, batches, longest)
    if system.is_sparse:
        arguments["sparse_budget"] = options.sparse_budget
        arguments["sparse_threshold"] = options.sparse_threshold
    if system.has_cache_rank:
        arguments["max_sparse_requests"] = max(batches)
    return Job(
        label,
        options.model,
        gpus=0 if options.model == BUNDLED else system.gpus,
        cache_rank=system.has_cache_rank,
        engine=arguments | system.arguments | options.engine | changes,
        shapes=list(shapes),
        servers=servers,
    )


def _engine_arguments(
    config: dict[str, Any], model: str, batches: set[int], longest: int
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
        # Chunks would otherwise repeat all tokens before them.
        "incremental_streaming_output": True,
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
        "random_seed": SEED,
        "attention_backend": "fa3",
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_bs_decode": sorted(batches),
        "mem_fraction_static": 0.85,
    }


def make_prompts(lengths: Sequence[int], vocabulary: int, seed: object) -> list[list[int]]:
    """Random tokens, the same for the same lengths and seed."""
    generator = random.Random(f"{seed}")
    low = min(256, vocabulary // 2)  # leave out special tokens of small vocabularies
    return [generator.choices(range(low, vocabulary), k=length) for length in lengths]
