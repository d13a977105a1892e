"""What `profile_tpot` can run: shapes, models, systems, presets, and the engine of each job.

A job is one engine and every shape it measures: starting an engine costs a minute or two, a shape
costs seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripts.accuracy.checkpoints import BUNDLED, BUNDLED_FOLDER
from scripts.accuracy.systems import parse_label

MODEL_SHAPES = Path(__file__).parent / "model_shapes"
ROOM_FOR_OUTPUT = 4096
"""Tokens that a sequence may grow by: shipping its prompt, settling, and the measured steps."""

TRACE_STEPS = 192
"""Tracing begins with the first sparse request of an engine; this reaches the measured steps."""

CAPACITY_BATCHES = (8, 16, 24, 32, 48, 64)
FIRST_PORT = 30000


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


class System(msgspec.Struct, frozen=True):
    """A way to serve.

    Attributes:
        arguments: of the engine.
        gpus: that it needs.
        cache_rank: it has one, so a request decodes densely until its prompt has been shipped.
        sparse: takes the flags of the sparse policy.
        at_budget: is run at a context of the sparse budget, whatever the shape's.
        cache_step: is the cache rank's step alone, without an engine.
    """

    arguments: dict[str, Any]
    gpus: int = 1
    cache_rank: bool = False
    sparse: bool = False
    at_budget: bool = False
    cache_step: bool = False


def _plain(gpus: int = 1, at_budget: bool = False, **arguments: Any) -> System:
    return System({"cache_rank_gpus": 0, **arguments}, gpus, at_budget=at_budget)


def _decode_mode(mode: str) -> System:
    return System({"cache_rank_gpus": 0, "decode_mode": mode}, sparse=True)


def _cache_rank(inference_kv: str) -> System:
    arguments = {"cache_rank_gpus": 1, "inference_kv": inference_kv}
    return System(arguments, gpus=2, cache_rank=True, sparse=True)


SYSTEMS = {
    "floor": _plain(at_budget=True),
    "dense": _plain(),
    "fp8": _plain(kv_cache_dtype="fp8_e4m3"),
    "tp2": _plain(gpus=2, tp_size=2),
    "tp2-fp8": _plain(gpus=2, tp_size=2, kv_cache_dtype="fp8_e4m3"),
    "window": _decode_mode("window"),
    "quest": _decode_mode("quest"),
    "tova": _decode_mode("tova"),
    "oracle": _decode_mode("oracle"),
    "cache-rank": _cache_rank("full"),
    "cache-rank-working-set": _cache_rank("working-set"),
    "cache-step": System({}, cache_step=True),
}


def parse_system(label: str) -> tuple[System, dict[str, Any]]:
    """A system and the engine arguments that its label changes: `cache-rank:delta_capacity=64`.

    Raises:
        ValueError: there is no such system, or an argument is not NAME=VALUE.
    """
    name, changed = parse_label(label)
    if name not in SYSTEMS:
        raise ValueError(f"no system {name!r}: choose from {', '.join(SYSTEMS)}")
    return SYSTEMS[name], changed


class Wish(msgspec.Struct, frozen=True):
    """One system, one model, and the shapes to measure."""

    model: str
    system: str
    shapes: tuple[Shape, ...]


class Settings(msgspec.Struct):
    """How every job is run.

    Attributes:
        sparse_budget: k.
        sparse_threshold: context from which the sparse systems are sparse.
        repeats, window: decode steps are measured in `repeats` windows of `window` steps.
        skip_steps: steps before the first window; None is what the system needs to settle.
        seed: of the prompts.
        shape_seconds: after which a shape is given up.
        capacity: context whose largest fitting batch is searched for, beside the shapes; 0 is none.
        memory_fraction: of a GPU that SGLang takes for weights and KV pool.
        engine: further engine arguments of every system.
        trace: systems with a cache rank write a trace.
        arrival: also measure the steps while one more request comes to a cache rank.
    """

    sparse_budget: int = 2048
    sparse_threshold: int = 4096
    repeats: int = 3
    window: int = 64
    skip_steps: int | None = None
    seed: int = 1
    shape_seconds: float = 300.0
    capacity: int = 0
    memory_fraction: float = 0.85
    engine: dict[str, Any] = msgspec.field(default_factory=dict)
    trace: bool = False
    arrival: bool = False


class Job(msgspec.Struct):
    """What a worker process is given.

    Attributes:
        gpus: that it needs.
        engine: arguments of `sglang_ext.Engine`.
        shapes: as run.
        capacity: context whose largest fitting batch is searched for; 0 is none.
        trace: where the cache rank's trace is written; empty for none.
        cache_step: measure the cache rank's step alone; `engine` holds fields of its configuration.
    """

    model: str
    system: str
    gpus: int
    cache_rank: bool
    engine: dict[str, Any]
    shapes: list[Shape]
    vocabulary: int
    settings: Settings
    capacity: int = 0
    trace: str = ""
    cache_step: bool = False

    @property
    def measures_arrival(self) -> bool:
        """Whether one more request comes when a batch has been measured."""
        return self.cache_rank and self.settings.arrival

    @property
    def name(self) -> str:
        """Usable as a file name."""
        text = f"{Path(self.model).name}-{self.system}"
        return "".join(c if c.isalnum() or c in "-._=" else "-" for c in text)


def model_config(model: str) -> tuple[Path, dict[str, Any]]:
    """Folder and configuration of a model: a name in `model_shapes`, `bundled`, or a folder.

    Raises:
        ValueError: there is none.
    """
    if model == BUNDLED:
        folder = BUNDLED_FOLDER
    else:
        named = MODEL_SHAPES / model
        folder = named if named.is_dir() else Path(model)
    config = folder / "config.json"
    if not config.is_file():
        names = sorted(path.name for path in MODEL_SHAPES.iterdir())
        raise ValueError(f"no model {model!r}: a folder, {BUNDLED}, or {', '.join(names)}")
    values: dict[str, Any] = json.loads(config.read_text())
    return folder, values


def make_job(wish: Wish, settings: Settings, out: Path) -> Job:
    """The engine of a wish, and its shapes as run."""
    system, changed = parse_system(wish.system)
    if system.cache_step:
        return _cache_step_job(wish, settings, changed)
    shapes, capacity = list(wish.shapes), settings.capacity
    if system.at_budget:
        if capacity:  # which batch will fit is not known yet
            shapes += [Shape(batch, capacity) for batch in CAPACITY_BATCHES]
        budget = changed.pop("sparse_budget", settings.sparse_budget)
        shapes, capacity = sorted({Shape(shape.batch, budget) for shape in shapes}), 0
    batches = {shape.batch for shape in shapes} | set(CAPACITY_BATCHES if capacity else ())
    if settings.arrival and system.cache_rank:
        batches |= {shape.batch + 1 for shape in shapes}
    longest = max([capacity, *(shape.context for shape in shapes)])

    folder, config = model_config(wish.model)
    arguments: dict[str, Any] = {
        "model_path": str(folder.resolve()),
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "context_length": longest + ROOM_FOR_OUTPUT,
        # SGLang counts a request twice while its prompt is computed in chunks, and would leave the
        # last one of the batch in the queue.
        "max_running_requests": max(batches) + 1,
        "chunked_prefill_size": 8192,
        "stream_interval": 1,
        "log_level": "info",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    trained = config["max_position_embeddings"]
    if wish.model == BUNDLED:
        arguments |= {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "max_total_tokens": 40000,
            "context_length": min(arguments["context_length"], trained),
            "sleep_on_idle": True,
        }
    else:
        arguments |= {
            "load_format": "dummy",
            "random_seed": settings.seed,
            "attention_backend": "fa3",
            "cuda_graph_backend_prefill": "disabled",
            "cuda_graph_bs_decode": sorted(batches),
            "mem_fraction_static": settings.memory_fraction,
        }
        if arguments["context_length"] > trained:
            # The rotary table is as long as the model says that it was trained for.
            override = {"max_position_embeddings": arguments["context_length"]}
            arguments["json_model_override_args"] = json.dumps(override)
    if system.sparse:
        arguments |= {
            "sparse_budget": settings.sparse_budget,
            "sparse_threshold": settings.sparse_threshold,
        }
    if system.cache_rank:
        arguments["max_sparse_requests"] = max(batches)
    job = Job(
        wish.model,
        wish.system,
        0 if wish.model == BUNDLED else system.gpus,
        system.cache_rank,
        arguments | system.arguments | settings.engine | changed,
        shapes,
        config["vocab_size"],
        settings,
        capacity,
    )
    if settings.trace and system.cache_rank:
        job.trace = str((out / "traces" / f"{job.name}.json").resolve())
        job.engine["trace"] = job.trace
        job.engine.setdefault("trace_steps", TRACE_STEPS)
    return job


def _cache_step_job(wish: Wish, settings: Settings, changed: dict[str, Any]) -> Job:
    _, config = model_config(wish.model)
    return Job(
        wish.model,
        wish.system,
        0 if wish.model == BUNDLED else 1,
        False,
        {"sparse_budget": settings.sparse_budget, **changed},
        list(wish.shapes),
        config["vocab_size"],
        settings,
        cache_step=True,
    )


def unmeasurable(job: Job, shape: Shape) -> str:
    """Why a shape makes no sense for a job, or nothing."""
    if job.cache_step:
        return ""
    threshold = job.engine.get("sparse_threshold", 0)
    if shape.context < threshold:
        return f"context is below --sparse-threshold {threshold}"
    if shape.context >= job.engine["context_length"]:
        return f"context is beyond the model's {job.engine['context_length']}"
    return ""


class Table2Row(msgspec.Struct, frozen=True):
    """A configuration of AsyncSpade Table 2; each was run on two kinds of GPU there."""

    model: str
    shape: Shape
    budget: int
    layers_per_group: int

    @property
    def system(self) -> str:
        return f"cache-step:sparse_budget={self.budget},layers_per_group={self.layers_per_group}"

    @property
    def floor(self) -> Shape:
        return Shape(self.shape.batch, self.budget)


TABLE2 = tuple(
    Table2Row(model, Shape(batch, context), budget, layers)
    for model, packings in (("qwen3-8b", (6, 12)), ("qwen3-32b", (4, 8)))
    for batch, context, budget in ((8, 32768, 2048), (16, 16384, 1024))
    for layers in packings
)
TABLE2_FLOOR = "dense"


def table2(models: Sequence[str]) -> list[Wish]:
    """AsyncSpade Table 2, section 5.4: cache management beside the inference it hides behind."""
    rows = [row for row in TABLE2 if row.model in models]
    floors = {model: sorted({row.floor for row in rows if row.model == model}) for model in models}
    return [
        *(Wish(model, TABLE2_FLOOR, tuple(shapes)) for model, shapes in floors.items() if shapes),
        *(Wish(row.model, row.system, (row.shape,)) for row in rows),
    ]


QUEST_TIME_SHAPES = (
    *(Shape(batch, 32768) for batch in (1, 2, 4, 8, 16)),
    *(Shape(4, context) for context in (8192, 16384, 65536, 131072)),
)


def quest_time(models: Sequence[str]) -> list[Wish]:
    """AsyncSpade Fig. 2: what selecting pages costs, by batch and by context."""
    return [
        Wish(model, system, QUEST_TIME_SHAPES) for model in models for system in ("window", "quest")
    ]


TPOT_SYSTEMS = (
    *("floor", "dense", "fp8", "tp2", "tp2-fp8", "window", "quest", "tova"),
    *("cache-rank", "cache-rank-working-set"),
)


def tpot(models: Sequence[str]) -> list[Wish]:
    """AsyncSpade Fig. 10: time per output token at 8 sequences of 32 K tokens."""
    return [Wish(model, system, (Shape(8, 32768),)) for model in models for system in TPOT_SYSTEMS]


EXPERIMENTS = {"table2": table2, "quest-time": quest_time, "tpot": tpot}
EXPERIMENT_MODELS = {
    "table2": ("qwen3-8b", "qwen3-32b"),
    "quest-time": ("qwen3-8b",),
    "tpot": ("qwen3-8b", "qwen3-32b"),
}
