"""Serves each system in turn, forces the same texts through it, and compares it with dense."""

from __future__ import annotations

import functools
import importlib.metadata
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm
from transformers import AutoTokenizer

from scripts.accuracy.servers import Servers, describe_server, machine_flags, reason_of
from scripts.accuracy.settings import attended_tokens, evaluated_system, system_flags
from scripts.language import forcing
from scripts.language.divergence import compare, kl_by_token
from scripts.language.forcing import Forced, force
from scripts.language.records import LayerRecall, ReadText, Report, Run, Score, without_budget
from scripts.language.report import write_report
from scripts.shared.lines import Lines
from scripts.shared.machine import describe, run_jobs
from scripts.shared.models import folder_of
from scripts.shared.serving import Client, ServerError
from scripts.shared.systems import CACHE_RANK, DENSE, System

LONGEST_TOKEN = 16
"""A token of a text has fewer characters than this, but for few."""

DIGITS = 6
"""The KL of a token is recorded with so many decimals."""

ENVIRONMENT = {"CACHE_RANK_ALLOW_LARGE_BUDGET": "1"}
"""A budget above the length of the texts shows that nothing but the selection costs anything."""

STATISTICS = (
    *("recall", "attention_mass", "held_recall", "held_attention_mass"),
    *("late_steps", "stale_steps"),
)
"""The statistics of a response, fields of Score, that a cache rank adds."""


class Tokens(NamedTuple):
    """A text as the model reads it: what is prefilled, and what is decoded."""

    name: str
    prompt: list[int]
    forced: list[int]


class Job(NamedTuple):
    """A server, and the texts that it decodes."""

    system: System
    texts: list[Tokens]
    gpus: int


def tokenize(options: Namespace) -> tuple[list[Tokens], dict[str, ReadText]]:
    """The first tokens of each text.

    Raises:
        ValueError: a text is too short.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder_of(options.model))
    tokens, read = [], {}
    for text in options.texts:
        start = text.read()[: LONGEST_TOKEN * options.context]  # a book takes a minute
        ids = tokenizer(start)["input_ids"]
        if len(ids) < options.context:
            raise ValueError(
                f"{text.name}: has {len(ids)} tokens, and --context {options.context} needs more"
            )
        before = options.context - options.tokens - options.warm_up
        tokens.append(Tokens(text.name, ids[:before], ids[before : options.context]))
        read[text.name] = ReadText(text.kind, text.sha256, options.context)
    return tokens, read


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


def server_flags(system: System, options: Namespace) -> list[str]:
    """The command line of a system's server; what the user gives comes last and wins."""
    requests = len(options.texts)
    prompt = options.context - options.tokens - options.warm_up
    return [
        *machine_flags(bool(options.gpus), requests, requests * options.context),
        *("--model-path", str(folder_of(options.model))),
        *forcing.SERVER_FLAGS,
        *system_flags(system, options.settings, 1, requests),
        # The first decode step is sparse, or begins to be, also with a budget above the length.
        *(("--sparse-threshold", str(prompt)) if system.mode == CACHE_RANK else ()),
        *options.server_flags,
    ]


class Scoring:
    """Runs servers, compares their distributions with those of dense decoding, and records it."""

    def __init__(self, options: Namespace, lines: Lines[Score], run: Run) -> None:
        self._options, self._lines, self._run = options, lines, run
        self._folder = options.out / "logits"
        self._servers = Servers()
        self._dense: dict[str, Forced] = {}

    def run_all(self, systems: Sequence[System], texts: list[Tokens]) -> None:
        """Score what is missing; a failing server is noted and the others go on.

        Raises:
            ServerError: dense decoding failed, which all is compared with.
        """
        done = {score.key for score in self._lines.read()}
        jobs = []
        for system in sorted(systems, key=lambda system: -system.gpus):
            missing = [text for text in texts if (system.label, text.name) not in done]
            if missing:
                jobs.append(self._job(system, missing))
        if not jobs:
            return
        run = functools.partial(run_jobs, gpus=self._options.gpus, stop=self._servers.stop)
        with tqdm(total=1 + len(jobs), unit="server", dynamic_ncols=True) as bar:
            try:
                step = functools.partial(self._run_job, bar)
                run([self._job(System.parse(DENSE), texts)], run=step, fail=self._note_failure)
                if not self._dense:
                    raise ServerError(f"dense decoding failed: {self._run.failures[DENSE]}")
                run(jobs, run=step, fail=self._note_failure)
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _job(self, system: System, texts: list[Tokens]) -> Job:
        return Job(system, texts, system.gpus if self._options.gpus else 0)

    def _run_job(self, bar: tqdm[Any], job: Job, gpus: list[str]) -> None:
        label = job.system.label
        bar.set_description(label)
        with self._servers.start(server_flags(job.system, self._options), gpus, ENVIRONMENT) as s:
            self._run.servers[label] = describe_server(s)
            decoded = dict(self._decode(s, job))
            self._run.layers[label] = layer_recall(s)
        if label == DENSE:
            self._dense = decoded
        else:
            for name, forced in decoded.items():
                self._lines.append(self._score(job.system, name, forced))
                forced.file.unlink()
        bar.update()

    def _decode(self, server: Client, job: Job) -> Iterator[tuple[str, Forced]]:
        folder = self._folder / job.system.label.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)

        def one(index: int) -> Forced:
            text = job.texts[index]
            return force(server, text.prompt, text.forced, folder / f"{index}.float32")

        with ThreadPoolExecutor(len(job.texts)) as pool:
            decoded = pool.map(one, range(len(job.texts)))
            yield from zip((text.name for text in job.texts), decoded, strict=True)

    def _score(self, system: System, name: str, forced: Forced) -> Score:
        """Compare a text that was decoded with its dense decoding.

        Raises:
            ServerError: it was not sparse from the first token on that counts.
        """
        tokens = len(forced.tokens)
        first = tokens - self._options.tokens  # that counts
        # The first token comes from the prefill, which is dense in every system.
        sparse_from = forced.first_sparse if system.has_cache_rank else 1
        if not system.is_sparse:
            sparse_from = first
        if sparse_from > first:
            reason = forced.statistics["dense_reason"] or "waits for its selection"
            raise ServerError(
                f"{name}: attention was dense for {sparse_from} tokens ({reason}): --warm-up "
                f"{first} is too short"
            )
        dense, found = (run.log_probabilities(sparse_from) for run in (self._dense[name], forced))
        counted = slice(first - sparse_from, None)
        divergence = compare(dense[counted], found[counted], forced.tokens[first:])
        label, budget = without_budget(system)
        statistics = forced.statistics
        return Score(
            name,
            label,
            budget,
            min(attended_tokens(system, self._options.settings), self._options.context)
            if system.is_sparse
            else self._options.context,
            self._options.tokens,
            **divergence._asdict(),
            sparse_from=sparse_from if system.is_sparse else None,
            kl_after_transition=kl_by_token(dense, found).round(DIGITS).tolist(),
            **{key: statistics[key] for key in STATISTICS if key in statistics},
        )

    def _note_failure(self, job: Job, error: Exception) -> None:
        self._run.failures[job.system.label] = reason_of(error)
        tqdm.write(f"{job.system.label} failed: {str(error)[-1500:]}", file=sys.stderr)


def layer_recall(server: Client) -> dict[int, LayerRecall]:
    """What a server measured by true keys, by layer; empty where it measured nothing."""
    measured = server.cache_rank().get("recall_by_head") or {}
    if "recall" not in measured:
        return {}
    means = (np.mean(measured[name], axis=-1) for name in LayerRecall.__struct_fields__)
    return {
        layer: LayerRecall(*map(float, values))
        for layer, *values in zip(measured["layers"], *means, strict=True)
    }


def score(options: Namespace, argv: Sequence[str]) -> tuple[Report, list[Path]]:
    """Score what OUT lacks, unless told to render only; the report, and its files.

    Raises:
        ServerError: dense decoding failed.
        ValueError: OUT does not suit the options, or a label or a text is wrong.
    """
    header, lines = options.out / "run.json", Lines(options.out / "scores.jsonl", Score)
    earlier = msgspec.json.decode(header.read_bytes(), type=Run) if header.is_file() else None
    if options.render:
        if earlier is None:
            raise ValueError(f"{header} does not exist: nothing to render")
        report = Report(earlier, lines.read())
        return report, write_report(report, options.out)
    systems = make_systems(options)
    tokens, texts = tokenize(options)
    run = Run(
        [shlex.join(["python", "-m", "scripts.score_text", *argv])],
        {
            **describe(list(dict.fromkeys(options.gpus))),
            **{part: importlib.metadata.version(part) for part in ("sglang", "torch")},
        },
        options.model,
        options.context,
        options.tokens,
        options.warm_up,
        options.settings,
        texts,
    )
    if earlier is not None:
        _go_on(run, earlier, options)
    lines.drop_half_line()
    header.write_bytes(msgspec.json.encode(run))
    try:
        Scoring(options, lines, run).run_all(systems, tokens)
    finally:  # also of an interrupted run, whose scores count
        header.write_bytes(msgspec.json.encode(run))
    report = Report(run, lines.read())
    return report, write_report(report, options.out)


def _go_on(run: Run, earlier: Run, options: Namespace) -> None:
    """Take over what an earlier run knew of its servers."""
    if not options.resume:
        raise ValueError(f"{options.out} has results: pass --resume, or another --out")
    for name in ("model", "context", "scored", "warm_up", "settings", "texts"):
        if getattr(run, name) != getattr(earlier, name):
            raise ValueError(f"{options.out} was made with another {name}: pass another --out")
    run.servers, run.layers = earlier.servers, earlier.layers
    run.commands = list(dict.fromkeys([*earlier.commands, *run.commands]))
