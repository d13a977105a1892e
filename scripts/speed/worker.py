"""One job, in a process of its own: an engine and the shapes that it measures.

    python -m scripts.speed.worker MESSAGES   < job.json

MESSAGES gets a line of JSON for each measurement when it begins, and another when it ended.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cache_rank.config import CacheRankConfig
from cache_rank.residency import DEFAULT_FORMAT
from scripts.shared.models import BUNDLED, model_config, model_shape
from scripts.shared.systems import residency_options
from scripts.speed.bench import Bench
from scripts.speed.cache_step import measure_cache_step
from scripts.speed.jobs import CAPACITY_BATCHES, Job, Shape
from scripts.speed.records import Measurement, Wire, summarize
from scripts.speed.weights import norms_for_unit_logits


def measure_on_engine(job: Job) -> Iterator[Measurement]:
    """Start the engine and measure every shape: each measurement as it begins and as it ended."""
    from scripts.baselines.plugin import Engine as BaselineEngine
    from scripts.speed.calibration import needs_calibration, write_blank
    from sglang_ext import Engine, compat

    arguments = dict(job.engine)
    with tempfile.TemporaryDirectory() as folder:
        if job.cache_rank and needs_calibration(arguments):
            write_blank(Path(folder), model_config(job.model), arguments)
            arguments["calibration"] = folder
        # Which has read the calibration once it has started.
        engine = (BaselineEngine if "decode_mode" in arguments else Engine)(**arguments)
    try:
        if job.model != BUNDLED:
            compat.load_weights(engine, norms_for_unit_logits(model_config(job.model)))
        bench = Bench(engine, job)
        for shape in job.shapes:
            yield (measurement := _begin(job, shape))
            bench.measure(measurement)
            yield measurement
        if job.capacity:
            yield from search_capacity(bench, job)
    finally:
        with contextlib.suppress(Exception):
            engine.shutdown()


def search_capacity(bench: Bench, job: Job) -> Iterator[Measurement]:
    """Measure the largest batch that fits: smaller ones as long as one turns out not to."""
    fitting = bench.pool_tokens
    if job.cache_rank:
        fitting = bench.cache_rank_tokens or 0
        if job.engine["inference_kv"] == "full":
            fitting = min(fitting, bench.pool_tokens)
    # A sequence grows by about so much while it is measured.
    grown = job.capacity + 2 * job.settings.steps
    for batch in reversed(CAPACITY_BATCHES):
        if batch * grown > fitting:
            continue
        yield (measurement := _begin(job, Shape(batch, job.capacity)))
        bench.measure(measurement)
        measurement.capacity_search = not measurement.failure
        yield measurement
        if not measurement.failure:
            return
    smallest = _begin(job, Shape(CAPACITY_BATCHES[0], job.capacity))
    smallest.failure = (
        f"no batch of {smallest.shape.batch} or more was measured; {fitting} tokens fit"
    )
    smallest.capacity_search, smallest.ended = True, time.time()
    yield smallest


def measure_cache_steps(job: Job) -> Iterator[Measurement]:
    """Measure the step of a cache rank alone: each measurement as it begins and as it ended."""
    import torch

    torch.set_grad_enabled(False)
    device = torch.device("cuda" if job.gpus else "cpu")
    model = model_shape(model_config(job.model))
    fields = {"kv_residency": DEFAULT_FORMAT, **job.engine, "model": model}
    if "kv_residency_options" in fields:  # a text, as in the arguments of a server
        fields["kv_residency_options"] = residency_options(fields)
    for shape in job.shapes:
        yield (measurement := _begin(job, shape))
        config = msgspec.convert({"max_rows": shape.batch, **fields}, CacheRankConfig)
        found = measure_cache_step(config, shape.context, job.settings.steps, device)
        summarize(measurement, found.seconds, job.settings.window)
        shipped = float(found.tokens_shipped)
        measurement.wire = Wire(1, 1, found.up_bytes, found.down_bytes, tokens_shipped=shipped)
        measurement.ended = time.time()
        yield measurement


def _begin(job: Job, shape: Shape) -> Measurement:
    return Measurement(job.model, job.system, shape, started=time.time())


def main(messages: str) -> None:
    """Run the job on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    measure = measure_cache_steps if job.cache_step else measure_on_engine
    with open(messages, "ab", buffering=0) as file:
        for measurement in measure(job):
            file.write(msgspec.json.encode(measurement) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
