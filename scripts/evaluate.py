"""Measure the accuracy of several ways to decode, on tasks whose every step is checked.

    python -m scripts.evaluate --preset budgets --out results/budgets
    python -m scripts.evaluate --preset jumps | predictors | residency | lengths --out ...
    python -m scripts.evaluate --model DIR --dials facts=1024,hops=1000,keys=1024 \
        --systems dense window quest cache-rank --budgets 16 64 256 --gpus 0 1 --out ...
    python -m scripts.evaluate --base-url URL --systems cache-rank --budgets 64 --out ...
    python -m scripts.evaluate --render --out results/budgets      # tables and plots again

Serves each system in turn and sends it all problems at once. Problems have seeds 0, 1, ..., the
same for every system. Writes outcomes.jsonl as results come, which `--resume` goes on from, then
results.json, results.md and plots.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from scripts.accuracy.checkpoints import folder_of, model_config, trained_for
from scripts.accuracy.outcomes import Cell, OutcomeFile, seeds_done
from scripts.accuracy.presets import PRESETS
from scripts.accuracy.report import write_report
from scripts.accuracy.runner import describe_server, run_cell
from scripts.accuracy.summary import Run, summarize
from scripts.accuracy.systems import POLICY, System, parse_label
from scripts.accuracy.tasks import TASKS
from scripts.shared.serving import PLAIN, Server, stop_on_sigterm
from scripts.speed.machine import describe, visible_gpus

GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PARTS = ("sglang", "torch")
REASON = 300
"""Characters of the last line of a failure that a report quotes."""


class Job(msgspec.Struct):
    """A server, and the cells that it answers.

    Attributes:
        system: that is served.
        cells: of that system and one model.
        longest: tokens of the longest problem, answer included.
        threshold: tokens before the first lookup, of the cell that states most.
    """

    system: System
    cells: list[Cell]
    longest: int
    threshold: int


class Seats:
    """GPUs, from which servers take turns; one that is listed twice has two servers at once."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._free = list(gpus)
        self._different = len(set(gpus))
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[list[str]]:
        """Wait for `count` different GPUs, in the order in which they were listed.

        Raises:
            ValueError: there are not so many.
        """
        if count > self._different:
            raise ValueError(f"needs {count} GPUs, and {self._different} are listed")
        with self._changed:
            self._changed.wait_for(lambda: len(set(self._free)) >= count)
            taken = list(dict.fromkeys(self._free))[:count]
            for gpu in taken:
                self._free.remove(gpu)
        try:
            yield taken
        finally:
            with self._changed:
                self._free = sorted([*self._free, *taken])
                self._changed.notify_all()


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """The servers to start, those that need most GPUs first.

    Raises:
        ValueError: a label or a dial is wrong.
    """
    systems: dict[str, System] = {}
    for label in options.systems:
        for budget in options.budgets:
            system = System.parse(label).with_budget(budget)
            systems[system.label] = system
    examples = [TASKS[options.task].make(0, **dials) for dials in options.dials]
    # The tokenizer adds <bos>.
    longest = max(len(e.prompt.split()) + e.max_tokens for e in examples) + 1
    threshold = max(example.stated_words for example in examples) + 1
    jobs = [
        Job(
            system,
            [Cell(options.model, label, options.task, dials) for dials in options.dials],
            longest,
            threshold,
        )
        for label, system in systems.items()
    ]
    return sorted(jobs, key=lambda job: -job.system.gpus)


def server_flags(job: Job, options: argparse.Namespace) -> list[str]:
    """Command line of a job's server; what the user gives comes last and wins."""
    requests = min(options.concurrency, options.chains)
    pool = max(40000, 2 * requests * job.longest)
    if options.gpus:
        batches = [str(batch) for batch in GRAPH_BATCHES if batch < 2 * requests]
        machine = [
            *("--dtype", "bfloat16", "--cuda-graph-backend-prefill", "disabled"),
            *("--cuda-graph-bs-decode", *batches, "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--disable-radix-cache"),
        ]
    else:
        machine = PLAIN[2:]  # without the choice of plain SGLang
    return [
        *machine,
        # SGLang counts a request twice while its prompt is computed in chunks.
        *("--max-running-requests", str(requests + 1), "--max-total-tokens", str(pool)),
        *("--model-path", str(folder_of(options.model))),
        *job.system.flags(options.settings, job.threshold, requests),
        *options.server_flags,
    ]


class Evaluation:
    """Runs jobs and collects outcomes."""

    def __init__(self, options: argparse.Namespace, file: OutcomeFile) -> None:
        self._options, self._file = options, file
        self._done = seeds_done(file.read())
        self._servers: set[Server] = set()
        self._stopping = False
        self.servers: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        """Run what is missing; a failing server is noted and the others go on."""
        wanted = sum(len(self._missing(cell)) for job in jobs for cell in job.cells)
        gpus = self._options.gpus
        seats = Seats(gpus)
        with (
            tqdm(total=wanted, unit="problem", dynamic_ncols=True) as bar,
            ThreadPoolExecutor(max(1, len(gpus))) as pool,
        ):
            running = [pool.submit(self._run_job, job, seats, bar) for job in jobs]
            try:
                wait(running)
            except BaseException:  # interrupted or terminated: leave no server behind
                self._stopping = True
                pool.shutdown(wait=False, cancel_futures=True)
                for server in list(self._servers):
                    server.stop()
                raise

    def _missing(self, cell: Cell) -> list[int]:
        done = self._done.get(cell.key, set())
        return [seed for seed in range(self._options.chains) if seed not in done]

    def _run_job(self, job: Job, seats: Seats, bar: tqdm[Any]) -> None:
        missing = {cell.key: self._missing(cell) for cell in job.cells}
        if self._stopping or not any(missing.values()):
            return
        try:
            with self._url(job, seats) as url:
                bar.set_description(job.system.label)
                self.servers[job.system.label] = describe_server(url)
                for cell in job.cells:
                    seeds = missing[cell.key]
                    for outcome in run_cell(url, cell, seeds, self._options.concurrency):
                        self._file.append(outcome)
                        bar.update()
        except Exception as error:
            if self._stopping:  # it did not fail, it was stopped
                return
            reason = str(error).strip().rpartition("\n")[2][-REASON:]
            self.failures[job.system.label] = f"{type(error).__name__}: {reason}"
            bar.write(f"{job.system.label} failed: {str(error)[-1500:]}", file=sys.stderr)

    @contextlib.contextmanager
    def _url(self, job: Job, seats: Seats) -> Iterator[str]:
        if self._options.base_url:
            yield self._options.base_url.rstrip("/")
            return
        with seats.take(job.system.gpus if self._options.gpus else 0) as gpus:
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            server = Server(server_flags(job, self._options), environment)
            self._servers.add(server)
            try:
                yield server.wait_ready().url
            finally:
                server.stop()
                self._servers.remove(server)


def parse_dials(text: str) -> dict[str, Any]:
    """Read `facts=128,hops=80`.

    Raises:
        argparse.ArgumentTypeError: it is not a list of NAME=VALUE.
    """
    try:
        return parse_label(f":{text}")[1]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with what the preset says where nothing is given."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the results")
    presets = "; ".join(f"{name}: {preset.question}" for name, preset in PRESETS.items())
    add("--preset", choices=list(PRESETS), default="budgets", help=presets)
    add(
        "--model",
        help="a folder, or the name of one in scripts/accuracy/models; default: the preset's",
    )
    add("--task", choices=list(TASKS), help="default: what the model is trained for")
    add("--dials", type=parse_dials, nargs="+", metavar="NAME=VALUE,...", help="one cell each")
    add("--systems", nargs="+", metavar="LABEL", help="NAME or NAME:ARGUMENT=VALUE,...")
    add("--budgets", type=int, nargs="+", metavar="K", help="of systems that name none")
    policy = ",".join(f"{name}={value}" for name, value in POLICY.items())
    add("--set", type=parse_dials, default={}, dest="settings", metavar="NAME=VALUE,...",
        help=f"server arguments of all sparse systems; default: {policy}")  # fmt: skip
    add("--chains", type=int, default=64, help="problems of a cell; default: %(default)s")
    add("--concurrency", type=int, default=64, help="requests at once; default: %(default)s")
    add("--gpus", nargs="*", metavar="GPU",
        help="that servers may use; one listed twice takes two servers; default: all")  # fmt: skip
    add("--server-flags", type=shlex.split, default=[], help="further flags of every server")
    add("--base-url", help="a server that runs already; takes one system, as a name")
    add("--resume", action="store_true", help="run what is missing in --out")
    add("--render", action="store_true", help="only write tables and plots again")
    options = parser.parse_args(argv)
    preset = PRESETS[options.preset]
    options.model = options.model or preset.model
    other = folder_of(options.model).name != folder_of(preset.model).name
    if other and options.task is None and options.dials is None:
        trained = trained_for(options.model)
        if trained is not None:
            options.task, options.dials = trained.task, [trained.dials]
    if not options.base_url and model_config(options.model) is None:
        parser.error(f"--model {options.model}: has no config.json")
    if options.task is None:
        options.task = preset.task
    elif options.task != preset.task and options.dials is None:
        options.dials = [{}]
    for name in ("dials", "systems", "budgets"):
        if getattr(options, name) is None:
            setattr(options, name, list(getattr(preset, name)))
    options.settings = {**POLICY, **options.settings}
    if options.gpus is None:
        options.gpus = visible_gpus()
    if options.chains < 2:
        parser.error("--chains must be at least 2: an interval needs several problems")
    if options.base_url and len(options.systems) * len(options.budgets) > 1:
        parser.error("--base-url serves one system: name one in --systems, with one of --budgets")
    return options


def describe_run(options: argparse.Namespace, argv: Sequence[str]) -> Run:
    """How this run is made."""
    versions = {part: importlib.metadata.version(part) for part in PARTS}
    return Run(
        [shlex.join(["python", "-m", "scripts.evaluate", *argv])],
        {**describe(list(dict.fromkeys(options.gpus))), **versions},
        options.settings,
        "bfloat16" if options.gpus else "float32",
    )


def main(argv: Sequence[str]) -> int:
    """Evaluate; the exit status."""
    options = parse_options(argv)
    header, file = options.out / "run.json", OutcomeFile(options.out / "outcomes.jsonl")
    run = describe_run(options, argv)
    earlier = msgspec.json.decode(header.read_bytes(), type=Run) if header.is_file() else None
    if options.render:
        if earlier is None:
            sys.exit(f"{header} does not exist: nothing to render")
        run = earlier
    else:
        if earlier is not None and not options.resume:
            sys.exit(f"{options.out} has results: pass --resume, or another --out")
        if earlier is not None and earlier.settings != run.settings:
            sys.exit(f"{header} has other settings: {earlier.settings}")
        if earlier is not None:
            run.servers = earlier.servers
            run.commands = list(dict.fromkeys([*earlier.commands, *run.commands]))
        try:
            jobs = make_jobs(options)
        except (TypeError, ValueError) as error:  # a dial's name, or its value
            sys.exit(f"error: {error}")
        file.drop_half_line()
        evaluation = Evaluation(options, file)
        header.write_bytes(msgspec.json.encode(run))
        try:
            evaluation.run(jobs)
        finally:  # also of an interrupted run, whose outcomes count
            run.servers, run.failures = (
                run.servers | evaluation.servers,
                evaluation.failures,
            )
            header.write_bytes(msgspec.json.encode(run))
    for path in write_report(run, summarize(file.read(), run), options.out):
        print(path)
    return 1 if run.failures else 0


if __name__ == "__main__":
    stop_on_sigterm()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("interrupted; what was answered is kept, for --resume")
