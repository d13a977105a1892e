"""Serves the system of a job, and measures it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
from safetensors.torch import save_file
from tqdm import tqdm

from scripts.shared.comparison import ENVIRONMENT
from scripts.shared.machine import memory_gib
from scripts.shared.models import model_config
from scripts.shared.serving import Client, Server, ServerError
from scripts.shared.systems import to_flags
from scripts.speed.calibration import needs_calibration, write_blank
from scripts.speed.jobs import Job
from scripts.speed.records import explain_failure
from scripts.speed.weights import norms_for_unit_logits

START_SECONDS = 600

FAILURES = (aiohttp.ClientError, OSError, RuntimeError, ValueError)
"""How a server or what is asked of it fails; what comes late is an OSError."""


class Measurement(Protocol):
    """What is measured of a job at one shape, or under one load."""

    failure: str  # why there are no numbers
    memory_gib: list[float]  # in use at the end, one entry a GPU


MeasurementT = TypeVar("MeasurementT", bound=Measurement)


def measure_each(
    measurements: Sequence[MeasurementT],
    measure: Callable[[list[Server], Job, MeasurementT], None],
    note: Callable[[MeasurementT], None],
    job: Job,
    gpus: Sequence[str],
    out: Path,
    count: int = 1,
) -> None:
    """Fill in the measurements of a job, one after the other; a failure ends the rest.

    Args:
        measurements: what there is to measure.
        measure: fills in one of them.
        note: takes each of them, filled in or failed.
        job: what is served.
        gpus: the GPUs that it may use, as CUDA_VISIBLE_DEVICES names them.
        out: folder of the results; what servers print goes to `logs` in it.
        count: servers side by side.
    """
    left = list(measurements)
    servers: list[Server] = []
    try:
        with _serve(job, gpus, out / "logs", count) as servers:
            for measurement in measurements:
                measure(servers, job, measurement)
                measurement.memory_gib = memory_gib(gpus[: count * job.gpus])
                note(left.pop(0))
    except FAILURES as error:
        tqdm.write(f"{job.system}: {error}", file=sys.stderr)
        log = "\n".join(server.tail() for server in servers)
        said = f"{log}\n{type(error).__name__}: {error}"
        for measurement in left:
            late = isinstance(error, TimeoutError)
            measurement.failure = explain_failure(said, bool(servers), late)
            note(measurement)


@contextlib.contextmanager
def _serve(job: Job, gpus: Sequence[str], logs: Path, count: int) -> Iterator[list[Server]]:
    """So many servers, each on GPUs of its own; all of their processes end with the context."""
    if count * job.gpus > len(gpus):
        raise ValueError(f"needs {count * job.gpus} GPUs, and there are {len(gpus)}")
    config, engine = model_config(job.settings.model), dict(job.engine)
    with contextlib.ExitStack() as held:
        if job.cache_rank and needs_calibration(engine):
            engine["calibration"] = held.enter_context(tempfile.TemporaryDirectory())
            write_blank(Path(engine["calibration"]), config, job.engine)
        servers: list[Server] = []
        logs.mkdir(parents=True, exist_ok=True)
        for first in range(0, count * max(1, job.gpus), max(1, job.gpus)):
            environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
            if job.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + job.gpus])
            log = logs / f"{job.name}-{len(servers)}.log"
            servers.append(Server(to_flags(engine), environment, log))
            held.callback(servers[-1].stop, wait_seconds=20)  # the next one needs the memory
        for server in servers:
            server.wait_ready(START_SECONDS)
            if engine.get("load_format") == "dummy":
                spread_logits(server, config)
        yield servers


def spread_logits(server: Client, config: dict[str, Any]) -> None:
    """Give a model of dummy weights norms by which attention prefers some tokens to others.

    Raises:
        ServerError: the server did not take them.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(norms_for_unit_logits(config)), Path(folder) / "norms.safetensors")
        body = {"model_path": folder, "load_format": "safetensors"}
        answer = server.post("/update_weights_from_disk", body)
    if answer.status_code != 200:
        raise ServerError(f"/update_weights_from_disk answers {answer.text}")
