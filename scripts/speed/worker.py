"""One job, in a process of its own: an engine and the shapes that it measures.

python -m scripts.speed.worker RESULT_FILE   < job.json
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cache_rank.config import CacheRankConfig
from scripts.shared.models import BUNDLED, model_config, model_shape
from scripts.shared.systems import residency_options
from scripts.speed.bench import Bench
from scripts.speed.cache_step import measure_cache_step
from scripts.speed.jobs import CAPACITY_BATCHES, Job, Shape
from scripts.speed.records import Measurement, Message, Wire, fitting_batch, summarize
from scripts.speed.weights import norms_for_unit_logits


def run_worker(result_file: Path) -> None:
    """Run the job on standard input, and append what happens to the result file, line by line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    with result_file.open("ab", buffering=0) as results:

        def say(message: Message) -> None:
            results.write(msgspec.json.encode(message) + b"\n")

        if job.cache_step:
            _measure_cache_steps(job, say)
            return
        from sglang_ext import Engine

        engine = Engine(**job.engine)
        try:
            if job.model != BUNDLED:
                norms = norms_for_unit_logits(model_config(job.model))
                engine.update_weights_from_tensor(norms)
            bench = Bench(engine, job)
            say(Message("ready", machine=_machine(bench)))
            for shape in job.shapes:
                say(Message("begin", shape))
                say(Message("end", shape, bench.measure(shape)))
            if job.capacity:
                search_capacity(bench, job, say)
        finally:
            with contextlib.suppress(Exception):
                engine.shutdown()


def _measure_cache_steps(job: Job, say: Callable[[Message], None]) -> None:
    """Measure the step of a cache rank alone, at each shape."""
    import torch

    torch.set_grad_enabled(False)
    device = torch.device("cuda" if job.gpus else "cpu")
    fields = {**job.engine, "model": model_shape(model_config(job.model))}
    if "kv_residency_options" in fields:  # a text, as in the arguments of a server
        fields["kv_residency_options"] = residency_options(fields)
    say(Message("ready", machine=_versions()))
    for shape in job.shapes:
        say(Message("begin", shape))
        measurement = Measurement(job.model, job.system, shape, started=time.time())
        config = msgspec.convert({"max_rows": shape.batch, **fields}, CacheRankConfig)
        settings = job.settings
        found = measure_cache_step(
            config, shape.context, settings.repeats * settings.window, device
        )
        summarize(measurement, found.seconds, settings.window)
        shipped = float(found.tokens_shipped)
        measurement.wire = Wire(1, 1, found.up_bytes, found.down_bytes, 0, shipped, 0, 0)
        measurement.ended = time.time()
        say(Message("end", shape, measurement))


def search_capacity(bench: Bench, job: Job, say: Callable[[Message], None]) -> None:
    """Measure the largest batch that fits: smaller ones as long as one turns out not to."""
    context = job.capacity
    tokens: int | None = bench.pool_tokens
    if job.cache_rank:
        tokens = bench.cache_rank_tokens
        if job.engine["inference_kv"] == "full":
            tokens = min(bench.pool_tokens, tokens or 0)
    # A sequence grows by about so much while it is measured.
    grown = context + 2 * job.settings.repeats * job.settings.window
    batches = fitting_batch(tokens, grown, CAPACITY_BATCHES)
    for batch in batches:
        shape = Shape(batch, context)
        say(Message("begin", shape))
        measurement = bench.measure(shape)
        measurement.capacity_search = not measurement.failure
        say(Message("end", shape, measurement))
        if not measurement.failure:
            return
    shape = Shape(CAPACITY_BATCHES[0], context)
    reason = f"no batch of {shape.batch} or more was measured; {tokens} tokens fit"
    say(Message("end", shape, Measurement(job.model, job.system, shape, reason, True)))


def _machine(bench: Bench) -> dict[str, Any]:
    return {
        **_versions(),
        "pool_tokens": bench.pool_tokens,
        "cache_rank_tokens": bench.cache_rank_tokens,
    }


def _versions() -> dict[str, Any]:
    return {name: importlib.metadata.version(name) for name in ("torch", "sglang")}


if __name__ == "__main__":
    run_worker(Path(sys.argv[1]))
