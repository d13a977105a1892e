"""The servers of each system, and what is measured on them, one after the other.

A job is one server, or several alike, and all that is measured on it: starting a server costs a
minute or two, a shape costs seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file
from tqdm import tqdm

from scripts.shared import machine
from scripts.shared.command import UsageError, command_line, explained
from scripts.shared.comparison import ENVIRONMENT
from scripts.shared.models import BUNDLED, folder_of, model_config
from scripts.shared.report import provenance, write_report
from scripts.shared.serving import Client, Server, ServerError, reason_of
from scripts.shared.systems import SYSTEMS, System, to_flags
from scripts.speed.calibration import norms_for_unit_logits, write_blank

START_SECONDS = 600

ROOM_FOR_OUTPUT = 4096
"""A sequence may grow by so many tokens while its prompt is shipped, settles and is measured."""

SEED = 1


class Shape(msgspec.Struct, frozen=True, order=True):
    """A batch of sequences of `context` tokens each, before the first generated token."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `8x32768`; UsageError if it is not of this form."""
        batch, _, context = text.partition("x")
        if not (batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
            raise UsageError(f"{text!r} is not a shape: write BATCHxCONTEXT, as in 8x32768")
        return cls(int(batch), int(context))


def add_engine_options(parser: argparse.ArgumentParser, budget: int | None) -> None:
    """Add the options of engines, systems and results; a budget of None is left to servers."""
    add = parser.add_argument
    parser.epilog = (
        "Weights are random numbers, in the shapes of scripts/speed/model_shapes. A system that\n"
        "fails is a line in the table, and its log is in OUT/logs; the exit status is 1 then."
    )
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
    each: list[dict[str, Any]] = []  # arguments of each server, where they are not alike


def make_job(
    label: str, shapes: Sequence[Shape], options: argparse.Namespace, servers: int = 1
) -> Job:
    """The engine of a system, and its shapes as run; UsageError if there is no such system."""
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


class Measurement(msgspec.Struct, kw_only=True):
    """What is measured of one system, at one shape or under one load."""

    system: str
    failure: str = ""  # why there are no numbers
    memory_gib: list[float] = []  # in use at the end, one entry a GPU

    @property
    def memory(self) -> str:
        """The memory in tables."""
        return " + ".join(f"{used:.1f}" for used in self.memory_gib) or "–"


class Results(msgspec.Struct):
    """All that is written: commands as one types them, the machine, engines and measurements."""

    commands: list[str]
    machine: dict[str, Any]
    jobs: list[Job] = []
    measurements: list[Any] = []
    conditions: dict[str, Any] = {}  # that all measurements have in common

    @classmethod
    def of(cls, name: str, argv: Sequence[str], jobs: list[Job]) -> Results:
        """None yet, of a `python -m scripts.NAME` on this machine."""
        return cls([command_line(name, argv)], machine.describe(machine.visible_gpus()), jobs)

    def write(self, out: Path, title: str, *parts: str) -> list[Path]:
        """Write results.json, and results.md with these parts, into a folder; the files."""
        head = f"# {title}: {self.jobs[0].model}", provenance(self.commands, self.machine)
        return write_report(out, "results", self, "\n\n".join((*head, *parts)))


def measure_all(
    results: Results,
    jobs: Sequence[Job],
    measurements_of: Callable[[Job], Sequence[Any]],
    measure: Callable[[list[Server], Job, Any], None],
    write: Callable[[Results, Path], list[Path]],
    out: Path,
) -> int:
    """Measure what there is to measure, and write the results whenever there are new ones.

    Jobs are served one after the other; `measurements_of` makes the measurements of each, and
    `measure` fills in one of them. A failure ends the measurements of its job. What servers print
    goes to `logs` in the folder. The exit status, which is returned, is 1 if anything has failed.
    """
    files: list[Path] = []
    for job in jobs:
        left, gpus = list(measurements_of(job)), machine.visible_gpus()[: job.servers * job.gpus]
        servers: list[Server] = []
        try:
            with serve_job(job, gpus, out / "logs") as servers:
                for measurement in tqdm(tuple(left), desc=job.system, dynamic_ncols=True):
                    measure(servers, job, measurement)
                    measurement.memory_gib = machine.memory_gib(gpus)
                    results.measurements.append(left.pop(0))
                    files = write(results, out)
        except Exception as error:  # a system must not take the others down
            tqdm.write(f"{job.system}: {error}", file=sys.stderr)
            log = "\n".join(server.tail() for server in servers)
            for measurement in left:
                measurement.failure = reason_of(error, log)
            results.measurements += left
            files = write(results, out)
    print(*files, sep="\n")
    return int(any(measurement.failure for measurement in results.measurements))


@contextlib.contextmanager
def serve_job(job: Job, gpus: Sequence[str], logs: Path) -> Iterator[list[Server]]:
    """The servers, each on GPUs of its own; all of their processes end with the context."""
    if job.servers * job.gpus > len(gpus):
        raise ValueError(f"needs {job.servers * job.gpus} GPUs, and there are {len(gpus)}")
    config, engine = model_config(job.model), dict(job.engine)
    name = re.sub(r"[^\w.=-]", "-", f"{Path(job.model).name}-{job.system}")
    with contextlib.ExitStack() as held:
        if engine.get("score_keys") == "sketch" and job.cache_rank and "calibration" not in engine:
            engine["calibration"] = held.enter_context(tempfile.TemporaryDirectory())
            write_blank(Path(engine["calibration"]), config, job.engine)
        servers: list[Server] = []
        logs.mkdir(parents=True, exist_ok=True)
        for index in range(job.servers):
            environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
            if job.gpus:
                own = gpus[index * job.gpus : (index + 1) * job.gpus]
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
            own_engine = job.each[index] if job.each else engine
            servers.append(Server(to_flags(own_engine), environment, logs / f"{name}-{index}.log"))
            held.callback(servers[-1].stop, wait_seconds=20)  # the next one needs the memory
        for server in servers:
            server.wait_ready(START_SECONDS)
            if engine.get("load_format") == "dummy":
                spread_logits(server, config)
        yield servers


def spread_logits(server: Client, config: dict[str, Any]) -> None:
    """Give a model of dummy weights norms by which attention prefers some tokens to others."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(norms_for_unit_logits(config)), Path(folder) / "norms.safetensors")
        body = {"model_path": folder, "load_format": "safetensors"}
        answer = server.post("/update_weights_from_disk", body)
    if answer.status_code != 200:
        raise ServerError(f"/update_weights_from_disk answers {answer.text}")
