"""Serves each system in turn, sends it all problems at once, and keeps every outcome."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from scripts.accuracy.outcomes import Cell, Outcome, Run
from scripts.accuracy.report import write_report
from scripts.accuracy.servers import Servers, describe_server, machine_flags, reason_of
from scripts.accuracy.settings import evaluated_system, system_flags
from scripts.accuracy.tasks import TASKS, Problem
from scripts.shared.lines import Lines
from scripts.shared.machine import describe, run_jobs
from scripts.shared.models import folder_of
from scripts.shared.serving import Client
from scripts.shared.systems import DENSE, System

REQUEST_SECONDS = 3600.0

STATISTICS = ("sparse_steps", "late_steps", "stale_steps")
"""The statistics of a response, fields of Outcome, that a cache rank adds."""


class Job(msgspec.Struct):
    """A server, and the cells that it answers."""

    system: System
    cells: list[Cell]  # cells of that system and one model
    gpus: int  # GPUs that the server needs
    longest: int  # tokens of the longest problem, answer included
    threshold: int  # tokens before the first lookup, of the cell that states most


def make_jobs(options: Namespace) -> list[Job]:
    """The servers to start, those that need most GPUs first.

    Raises:
        ValueError: a label or a dial is wrong.
    """
    systems: dict[str, System] = {}
    for label in options.systems:
        for budget in options.budgets:
            system = evaluated_system(label).with_budget(budget)
            systems[system.label] = system
    examples = [TASKS[options.task].make(0, **dials) for dials in options.dials]
    # The tokenizer adds <bos>.
    longest = max(len(e.prompt.split()) + e.max_tokens for e in examples) + 1
    threshold = max(example.stated_words for example in examples) + 1
    starts_on_gpus = bool(options.gpus) and not options.base_url
    jobs = [
        Job(
            system,
            [Cell(options.model, label, options.task, dials) for dials in options.dials],
            system.gpus if starts_on_gpus else 0,
            longest,
            threshold,
        )
        for label, system in systems.items()
    ]
    return sorted(jobs, key=lambda job: -job.system.gpus)


def server_flags(job: Job, options: Namespace) -> list[str]:
    """The command line of a job's server; what the user gives comes last and wins."""
    requests = min(options.concurrency, options.chains)
    return [
        *machine_flags(bool(options.gpus), requests, requests * job.longest),
        *("--model-path", str(folder_of(options.model))),
        *system_flags(job.system, options.settings, job.threshold, requests),
        *options.server_flags,
    ]


def run_cell(
    server: Client, cell: Cell, seeds: Iterable[int], concurrency: int
) -> Iterator[Outcome]:
    """Decode a cell's problems, so many at once; outcomes in the order in which they end.

    Raises:
        requests.RequestException: the server refused a problem or is gone.
        ValueError: the task does not take the dials.
    """
    task = TASKS[cell.task]
    with ThreadPoolExecutor(concurrency) as pool:
        calls = [
            pool.submit(_decode, server, cell, seed, task.make(seed, **cell.dials))
            for seed in seeds
        ]
        try:
            for call in as_completed(calls):
                yield call.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _decode(server: Client, cell: Cell, seed: int, problem: Problem) -> Outcome:
    sampling: dict[str, Any] = {"max_new_tokens": problem.max_tokens, **problem.sampling}
    if cell.system == DENSE:  # also on a server which has a cache rank
        sampling["custom_params"] = {"cache_rank": False}
    # SGLang refuses an empty text; a space is no word, and leaves <bos>.
    body = {"text": problem.prompt or " ", "sampling_params": sampling}
    response = server.post("/generate", body, timeout=REQUEST_SECONDS)
    response.raise_for_status()
    decoded = response.json()
    grade, meta = problem.grade(decoded["text"]), decoded["meta_info"]
    cache_rank = meta.get("cache_rank") or {}
    return Outcome(
        cell,
        seed,
        *(grade.correct_hops, grade.correct_prefix_hops, grade.hops, grade.exact),
        *(meta["prompt_tokens"], meta["completion_tokens"]),
        **{name: cache_rank[name] for name in STATISTICS if name in cache_rank},
    )


class Evaluation:
    """Runs jobs, appends their outcomes to a file and notes in a Run what became of servers."""

    def __init__(self, options: Namespace, file: Lines[Outcome], run: Run) -> None:
        self._options, self._file, self._run = options, file, run
        self._done = {(outcome.cell.key, outcome.seed) for outcome in file.read()}
        self._servers = Servers()

    def run_all(self, jobs: Sequence[Job]) -> None:
        """Run what is missing; a failing server is noted and the others go on."""
        jobs = [job for job in jobs if any(map(self._missing, job.cells))]
        wanted = sum(len(self._missing(cell)) for job in jobs for cell in job.cells)
        with tqdm(total=wanted, unit="problem", dynamic_ncols=True) as bar:
            run = functools.partial(self._run_job, bar)
            run_jobs(jobs, self._options.gpus, run, self._note_failure, self._servers.stop)

    def _missing(self, cell: Cell) -> list[int]:
        return [seed for seed in range(self._options.chains) if (cell.key, seed) not in self._done]

    def _run_job(self, bar: tqdm[Any], job: Job, gpus: list[str]) -> None:
        with self._server(job, gpus) as server:
            bar.set_description(job.system.label)
            self._run.servers[job.system.label] = describe_server(server)
            for cell in job.cells:
                missing = self._missing(cell)
                for outcome in run_cell(server, cell, missing, self._options.concurrency):
                    self._file.append(outcome)
                    bar.update()

    @contextlib.contextmanager
    def _server(self, job: Job, gpus: list[str]) -> Iterator[Client]:
        if self._options.base_url:
            yield Client(self._options.base_url)
            return
        with self._servers.start(server_flags(job, self._options), gpus) as server:
            yield server

    def _note_failure(self, job: Job, error: Exception) -> None:
        self._run.failures[job.system.label] = reason_of(error)
        tqdm.write(f"{job.system.label} failed: {str(error)[-1500:]}", file=sys.stderr)


def evaluate(options: Namespace, argv: Sequence[str]) -> tuple[Run, list[Path]]:
    """Run what OUT lacks, unless told to render only; the run, and the files of its report.

    Raises:
        TypeError: the task does not have a dial.
        ValueError: OUT does not suit the options, or a label or a dial is wrong.
    """
    header, file = options.out / "run.json", Lines(options.out / "outcomes.jsonl", Outcome)
    earlier = msgspec.json.decode(header.read_bytes(), type=Run) if header.is_file() else None
    if options.render:
        if earlier is None:
            raise ValueError(f"{header} does not exist: nothing to render")
        return earlier, write_report(earlier, file.read(), options.out)
    run = Run(
        [shlex.join(["python", "-m", "scripts.evaluate", *argv])],
        {
            **describe(list(dict.fromkeys(options.gpus))),
            **{part: importlib.metadata.version(part) for part in ("sglang", "torch")},
        },
        options.settings,
        "bfloat16" if options.gpus else "float32",
    )
    if earlier is not None:
        if not options.resume:
            raise ValueError(f"{options.out} has results: pass --resume, or another --out")
        if earlier.settings != run.settings:
            raise ValueError(f"{header} has other settings: {earlier.settings}")
        run.servers = earlier.servers
        run.commands = list(dict.fromkeys([*earlier.commands, *run.commands]))
    jobs = make_jobs(options)
    file.drop_half_line()
    header.write_bytes(msgspec.json.encode(run))
    try:
        Evaluation(options, file, run).run_all(jobs)
    finally:  # also of an interrupted run, whose outcomes count
        header.write_bytes(msgspec.json.encode(run))
    return run, write_report(run, file.read(), options.out)
