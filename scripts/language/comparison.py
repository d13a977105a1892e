"""Serves dense decoding first, and then each system that is compared with it."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tqdm import tqdm

from scripts.accuracy.servers import Servers, describe_server, machine_flags, reason_of
from scripts.accuracy.settings import evaluated_system, system_flags
from scripts.language import forcing
from scripts.language.runs import Run
from scripts.shared.machine import run_jobs
from scripts.shared.models import folder_of
from scripts.shared.serving import Client, ServerError
from scripts.shared.systems import CACHE_RANK, DENSE, System

ENVIRONMENT = {"CACHE_RANK_ALLOW_LARGE_BUDGET": "1"}
"""A budget above the length of the texts shows that nothing but the selection costs anything."""

SERVERS_ON_A_CPU = 2
"""At a time: most of a start is imports, which keep one core busy."""

WorkT = TypeVar("WorkT")


class Load(NamedTuple):
    """What a server has to hold.

    Attributes:
        requests: at once.
        tokens: of all of them together.
        shortest: prompt in tokens; decode is sparse, or begins to be, from its first step on.
    """

    requests: int
    tokens: int
    shortest: int


class Job(NamedTuple, Generic[WorkT]):
    """A server, and what it decodes."""

    system: System
    work: Sequence[WorkT]
    gpus: int


def make_systems(options: Namespace) -> list[System]:
    """The systems that are compared with dense decoding, each with each budget.

    Raises:
        ValueError: a label is wrong.
    """
    systems: dict[str, System] = {}
    for label in options.systems:
        for budget in options.budgets:
            system = evaluated_system(label).with_budget(budget)
            systems[system.label] = system
    return [system for label, system in systems.items() if label != DENSE]


def server_flags(system: System, options: Namespace, load: Load) -> list[str]:
    """The command line of a system's server; what the user gives comes last and wins."""
    return [
        *machine_flags(bool(options.gpus), load.requests, load.tokens),
        *("--model-path", str(folder_of(options.model))),
        *forcing.SERVER_FLAGS,
        *system_flags(system, options.settings, 1, load.requests),
        # Also with a budget above the length.
        *(("--sparse-threshold", str(load.shortest)) if system.mode == CACHE_RANK else ()),
        *options.server_flags,
    ]


class Comparison(Generic[WorkT]):
    """Runs servers, and notes in a Run what became of them."""

    def __init__(
        self,
        options: Namespace,
        load: Load,
        run: Run,
        decode: Callable[[Client, System, Sequence[WorkT]], None],
    ) -> None:
        """Take what decodes the work of a job with its server, and keeps what came out."""
        self._options, self._load, self._run, self._decode = options, load, run, decode
        self._servers = Servers()

    def run_all(
        self,
        dense: Sequence[WorkT],
        others: Sequence[tuple[System, Sequence[WorkT]]],
        bar: tqdm[Any],
    ) -> None:
        """Serve dense decoding and then the others; one that fails is noted and the rest go on.

        Raises:
            ServerError: dense decoding failed, which all is compared with.
        """
        self._serve([(System.parse(DENSE), dense)], bar)
        if DENSE in self._run.failures:
            raise ServerError(f"dense decoding failed: {self._run.failures[DENSE]}")
        self._serve(sorted(others, key=lambda other: -other[0].gpus), bar)

    def _serve(self, work: Sequence[tuple[System, Sequence[WorkT]]], bar: tqdm[Any]) -> None:
        on_gpus = bool(self._options.gpus)
        jobs = [Job(s, items, s.gpus if on_gpus else 0) for s, items in work if items]
        run = functools.partial(self._run_job, bar)
        at_once = None if on_gpus else SERVERS_ON_A_CPU
        run_jobs(jobs, self._options.gpus, run, self._note_failure, self._servers.stop, at_once)

    def _run_job(self, bar: tqdm[Any], job: Job[WorkT], gpus: list[str]) -> None:
        label = job.system.label
        bar.set_description(label)
        flags = server_flags(job.system, self._options, self._load)
        with self._servers.start(flags, gpus, ENVIRONMENT) as server:
            self._run.servers[label] = describe_server(server)
            self._decode(server, job.system, job.work)

    def _note_failure(self, job: Job[WorkT], error: Exception) -> None:
        self._run.failures[job.system.label] = reason_of(error)
        tqdm.write(f"{job.system.label} failed: {str(error)[-1500:]}", file=sys.stderr)
