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

from scripts.baselines.plugin import Engine as BaselineEngine
from scripts.shared.models import BUNDLED, model_config
from scripts.speed.bench import Bench
from scripts.speed.calibration import needs_calibration, write_blank
from scripts.speed.jobs import Job
from scripts.speed.records import Measurement
from scripts.speed.weights import norms_for_unit_logits
from sglang_ext import Engine, compat


def measure(job: Job) -> Iterator[Measurement]:
    """Start the engine and measure every shape: each measurement as it begins and as it ended."""
    arguments, config = dict(job.engine), model_config(job.settings.model)
    with tempfile.TemporaryDirectory() as folder:
        if job.cache_rank and needs_calibration(arguments):
            write_blank(Path(folder), config, arguments)
            arguments["calibration"] = folder
        # Which has read the calibration once it has started.
        engine = (BaselineEngine if "decode_mode" in arguments else Engine)(**arguments)
    try:
        if job.settings.model != BUNDLED:
            compat.load_weights(engine, norms_for_unit_logits(config))
        bench = Bench(engine, job)
        for shape in job.shapes:
            yield (measurement := Measurement(job.system, shape, started=time.time()))
            bench.measure(measurement)
            yield measurement
    finally:
        with contextlib.suppress(Exception):
            engine.shutdown()


def main(messages: str) -> None:
    """Run the job on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    with open(messages, "ab", buffering=0) as file:
        for measurement in measure(job):
            file.write(msgspec.json.encode(measurement) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
