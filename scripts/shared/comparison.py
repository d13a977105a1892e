"""What commands share that compare systems: options, how each system is served, the record."""

from __future__ import annotations

import argparse
import queue
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from tqdm import tqdm

from scripts.shared.command import UsageError, command_line, explained
from scripts.shared.machine import describe, visible_gpus
from scripts.shared.models import folder_of, model_config
from scripts.shared.report import provenance
from scripts.shared.serving import PLAIN, Client, Server, reason_of
from scripts.shared.systems import CACHE_RANK, INLINE, SYSTEMS, System, parse_assignments, to_flags
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

ENVIRONMENT = {ALLOW_LARGE_BUDGET_VARIABLE: "1"}
"""A budget above the length of a request shows that nothing but the selection costs anything."""

SERVERS_ON_A_CPU = 2
"""At a time: most of a start is imports, which keep one core busy."""

GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)

LEAST_POOL_TOKENS = 8192

_SHARED = ("sparse_budget", "sink_tokens", "recent_tokens", "dense_layers")
"""The baselines take these arguments of sparse systems."""


class Load(NamedTuple):
    """What a server has to hold."""

    requests: int  # at once
    tokens: int  # of all of them together
    threshold: int  # tokens of a request before it turns sparse


class Run(msgspec.Struct):
    """How results came about."""

    commands: list[str]
    machine: dict[str, Any]
    model: str  # folder or name
    settings: dict[str, Any]  # arguments of sparse systems
    failures: dict[str, str] = {}  # of servers, by label

    @classmethod
    def of(cls, name: str, argv: Sequence[str], options: argparse.Namespace, **more: Any) -> Self:
        """That of a `python -m scripts.NAME`, before any server is started."""
        machine = describe(list(dict.fromkeys(options.gpus)))
        command, settings = command_line(name, argv), options.settings
        return cls([command], machine, options.model, settings, **more)

    def head(self) -> str:
        """The head of a report: commands, machine and settings."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{provenance(self.commands, self.machine)} Sparse systems: {settings}."

    def foot(self) -> list[str]:
        """The foot of a report: a line a server that failed."""
        return [f"{label} failed: {reason}" for label, reason in self.failures.items()]


def add_options(
    parser: argparse.ArgumentParser,
    model: str,
    systems: Sequence[str],
    budgets: Sequence[int],
    settings: Mapping[str, Any],
) -> None:
    """Add the options that all comparisons have, with their defaults."""
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the results")
    add("--model-path", "--model", dest="model", default=model,
        help="a folder, or a name as smollm2; default: %(default)s")  # fmt: skip
    add("--systems", nargs="+", default=list(systems), metavar="LABEL",
        help="NAME or NAME:ARGUMENT=VALUE,...; default: %(default)s")  # fmt: skip
    add("--budgets", type=int, nargs="+", default=list(budgets), metavar="K",
        help="tokens that each KV head selects; default: %(default)s")  # fmt: skip
    given = ",".join(f"{name}={value}" for name, value in settings.items())
    add("--set", type=parse_assignments, default={}, dest="settings",
        metavar="NAME=VALUE,...",
        help=f"server arguments of all sparse systems; default: {given}")  # fmt: skip
    add("--gpus", nargs="*", metavar="GPU",
        help="that servers may use; default: all")  # fmt: skip
    add("--server-flags", type=explained(shlex.split), default=[],
        help="further flags of every server")  # fmt: skip


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str], settings: Mapping[str, Any]
) -> argparse.Namespace:
    """Read a command line, with settings and the machine where it says nothing."""
    options = parser.parse_args(argv)
    options.settings = {**settings, **options.settings}
    if options.gpus is None:
        options.gpus = visible_gpus()
    if min(options.budgets) < 1:
        parser.error("--budgets must be at least 1")
    model_config(options.model)
    make_systems(options)
    return options


def make_systems(options: argparse.Namespace) -> list[System]:
    """The systems of a command line, with each budget left open; UsageError if one is of speed."""
    systems: dict[str, System] = {}
    for label in options.systems:
        system = System.parse(label)
        if system.at_budget:
            raise UsageError(f"the system {system.name!r} is one of speed: it answers no requests")
        for budget in options.budgets:
            one = system.with_budget(budget)
            systems[one.label] = one
    return list(systems.values())


def server_flags(system: System, options: argparse.Namespace, load: Load) -> list[str]:
    """The command line of a system's server; what the user gives comes last and wins."""
    arguments = {**system.arguments, **system.changes}
    if system.is_sparse:
        settings = {**options.settings, **system.changes}
        if system.mode != CACHE_RANK:
            arguments |= {name: settings[name] for name in _SHARED if name in settings}
            if system.mode == INLINE:
                arguments["sparse_threshold"] = load.threshold
        else:
            # A selection may change whole from one step to the next, as it does in the baselines.
            arguments |= {"max_swap_tokens": settings["sparse_budget"], **settings}
            arguments["sparse_threshold"] = load.threshold
            arguments["max_sparse_requests"] = load.requests
    return [
        *_machine_flags(bool(options.gpus), load),
        *("--model-path", str(folder_of(options.model))),
        *to_flags(arguments),
        *options.server_flags,
    ]


def _machine_flags(on_gpus: bool, load: Load) -> list[str]:
    """Flags that any system needs on this machine."""
    machine = PLAIN[2:]  # without the choice of plain SGLang
    if on_gpus:
        batches = [str(batch) for batch in GRAPH_BATCHES if batch < 2 * load.requests]
        machine = [
            *("--dtype", "bfloat16", "--cuda-graph-backend-prefill", "disabled"),
            *("--cuda-graph-bs-decode", *batches, "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--disable-radix-cache"),
        ]
    # SGLang counts a request twice while its prompt is computed in chunks.
    requests, tokens = load.requests + 1, max(LEAST_POOL_TOKENS, 2 * load.tokens)
    return [*machine, "--max-running-requests", str(requests), "--max-total-tokens", str(tokens)]


def serve_each(
    systems: Sequence[System],
    options: argparse.Namespace,
    load: Load,
    run: Run,
    use: Callable[[Client, System], None],
) -> None:
    """Serve systems, as many at once as there are GPUs for; one that fails is noted in the run.

    `use` is called with each server, from several threads.
    """
    on_gpus = len(options.gpus)
    most = min(on_gpus, max((system.gpus for system in systems), default=1))
    places: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
    for place in range(on_gpus // most if most else SERVERS_ON_A_CPU):
        places.put(options.gpus[place * most : (place + 1) * most])
    running: set[Server] = set()

    def serve_one(system: System) -> None:
        gpus = places.get()
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[: system.gpus])} if gpus else {}
        try:
            if on_gpus and system.gpus > most:
                raise ValueError(f"needs {system.gpus} GPUs, and there are {on_gpus}")
            server = Server(server_flags(system, options, load), {**seen, **ENVIRONMENT})
            running.add(server)
            try:
                use(server.wait_ready(), system)
            finally:
                server.stop()
        except Exception as error:  # a system must not take the others down
            run.failures[system.label] = reason_of(error)
            tqdm.write(f"{system.label} failed: {str(error)[-1500:]}", file=sys.stderr)
        places.put(gpus)

    with ThreadPoolExecutor(places.qsize()) as threads:
        try:
            served = threads.map(serve_one, systems)
            list(tqdm(served, total=len(systems), unit="server", dynamic_ncols=True))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for server in list(running):
                server.stop()
            raise


def place_of(label: str) -> int:
    """Where a system stands in tables."""
    return list(SYSTEMS).index(label.partition(":")[0])
