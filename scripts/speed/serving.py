"""Serves the systems of a script, and measures them one after the other."""

from __future__ import annotations

import contextlib
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
from scripts.shared.command import command_line
from scripts.shared.comparison import ENVIRONMENT
from scripts.shared.models import model_config
from scripts.shared.report import provenance, write_report
from scripts.shared.serving import Client, Server, ServerError, reason_of
from scripts.shared.systems import to_flags
from scripts.speed.calibration import norms_for_unit_logits, write_blank
from scripts.speed.jobs import Job

START_SECONDS = 600


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

    Jobs are served one after the other. A failure ends the measurements of its job. What servers
    print goes to `logs` in the folder.

    Args:
        measurements_of: makes the measurements of a job, to be filled in.
        measure: fills in one of them.

    Returns:
        The exit status: 1 if something could not be measured.
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
            servers.append(Server(to_flags(engine), environment, logs / f"{name}-{index}.log"))
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
