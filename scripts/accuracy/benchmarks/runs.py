"""One benchmark on one server, and the folder that it leaves.

OUT/BENCHMARK/run.json           what was asked of which server; written at first and at the end
OUT/BENCHMARK/questions.jsonl    the questions as they were asked
OUT/BENCHMARK/prompt.yaml        if it is not the benchmark's own
OUT/BENCHMARK/sgl_eval_*/        the harness's answers and metrics
"""

from __future__ import annotations

import json
import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from scripts.accuracy.benchmarks import harness
from scripts.accuracy.benchmarks.harness import Sampling
from scripts.accuracy.benchmarks.questions import (
    BENCHMARKS,
    Benchmark,
    Question,
    digest,
    read_questions,
    write_questions,
)
from scripts.accuracy.benchmarks.server import Counters, EvaluatedServer
from scripts.shared.serving import ServerError

MOST_THREADS = 64
PROMPT_TOKENS = 2048
"""A question is taken to have so many tokens where requests at a time are counted."""

_NO_ROOM = ("max_sparse_requests", "cache_rank_memory")


class Record(msgspec.Struct):
    """What was run; `run.json`."""

    benchmark: str
    command: list[str]  # our command line
    harness_command: list[str]
    extra_body: dict[str, Any]  # what every request holds beside the harness's command
    versions: dict[str, str]  # versions of the harness and of this package
    questions: int
    questions_sha256: str  # digest of questions.jsonl
    sampling: Sampling
    dense: bool  # requests asked to stay dense
    threads: int  # requests at a time
    server: dict[str, Any]  # what `/server_info` said
    counters: Counters = msgspec.field(default_factory=Counters)  # what happened meanwhile
    cache_rank: dict[str, Any] = {}  # what `/server_info` said of it after the last answer
    warnings: list[str] = []  # what a reader of the results has to know
    started: float = 0.0  # Unix time
    seconds: float = 0.0


class Run(msgspec.Struct):
    """A finished run."""

    folder: Path
    record: Record
    answers: pd.DataFrame  # see harness.read_answers


def run_benchmarks(options: Namespace, command: Sequence[str]) -> None:
    """Ask a server every question of the benchmarks of a command line, and keep the answers.

    Args:
        options: what `scripts.benchmark run` was given.
        command: our command line, for the record.

    Raises:
        FileExistsError: a benchmark has a folder already.
        InterruptedError: the harness did not end well; what it has is kept.
        OSError: the questions cannot be read, or not from the hub.
        ServerError: the server is not one on which the benchmarks mean anything.
        ValueError: a malformed file of questions.
    """
    server = EvaluatedServer(options.base_url)
    for name in options.benchmarks:
        print(f"{name}: {_run_benchmark(BENCHMARKS[name], server, options, command)}")


def _run_benchmark(
    benchmark: Benchmark, server: EvaluatedServer, options: Namespace, command: Sequence[str]
) -> Path:
    """One of the benchmarks; its folder."""
    folder: Path = options.out / benchmark.name
    sampling = Sampling(
        repeats=options.n_repeats or benchmark.repeats,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
        thinking=not options.no_thinking,
        prompt=options.prompt.read_text(encoding="utf-8") if options.prompt else "",
    )
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: give another --out, or remove it")
    if server.context_length < sampling.max_tokens + 1:
        raise ServerError(
            f"the server's requests have at most {server.context_length} tokens, prompt included: "
            f"no room for --max-tokens {sampling.max_tokens}"
        )
    threads = _threads(server, options)
    questions = _load(benchmark, options.from_dataset)[: options.num_examples]

    folder.mkdir(parents=True)
    asked = folder / "questions.jsonl"
    write_questions(questions, asked)
    prompt = folder / "prompt.yaml" if sampling.prompt else None
    if prompt:
        prompt.write_text(sampling.prompt, encoding="utf-8")
    record = Record(
        benchmark=benchmark.name,
        command=list(command),
        harness_command=harness.arguments(
            benchmark, asked, prompt, folder, server.url, sampling, threads
        ),
        extra_body=harness.extra_body(sampling, options.dense),
        versions={
            "sgl-eval": harness.harness_version(),
            "sglang-cache-rank": version("sglang-cache-rank"),
        },
        questions=len(questions),
        questions_sha256=digest(asked),
        sampling=sampling,
        dense=options.dense,
        threads=threads,
        server=server.info,
        started=time.time(),
    )
    if sampling.thinking and not server.info.get("reasoning_parser"):
        record.warnings.append(
            "the server has no --reasoning-parser: answers are read from within the thinking, also "
            "of an answer that was cut short"
        )
    write_record(record, folder)

    print(f"{len(questions)} questions, {sampling.repeats} answers each, {threads} at a time")
    print(shlex.join(["sgl-eval", *record.harness_command]))
    if record.extra_body:
        print(f"  and in every request {json.dumps(record.extra_body)}")
    before = server.counters()
    status = harness.run_harness(record.harness_command, record.extra_body)
    record.seconds = time.time() - record.started
    record.counters = server.counters().since(before)
    record.cache_rank = server.cache_rank()
    if status:
        record.warnings.append(f"the harness ended with status {status}")
        write_record(record, folder)
        raise InterruptedError(f"the harness ended with status {status}; see {folder}")
    failed = harness.read_answers(folder, [q["id"] for q in questions], sampling.repeats).failed
    if failed.any():
        record.warnings.append(f"{failed.sum()} of {failed.size} requests failed and are left out")
    record.warnings += _warnings_of_steps(record)
    write_record(record, folder)
    for warning in record.warnings:
        print(f"warning: {warning}")
    return folder


def read_run(folder: Path) -> Run:
    """Read what `run_benchmark` left.

    Raises:
        FileNotFoundError: the folder has no finished run.
        ValueError: the run was cut short, or its questions are not those that it began with.
    """
    record = msgspec.json.decode((folder / "run.json").read_bytes(), type=Record)
    asked = folder / "questions.jsonl"
    if digest(asked) != record.questions_sha256:
        raise ValueError(f"{asked} is not the file that the questions were asked from")
    questions = [question["id"] for question in read_questions(asked)]
    return Run(folder, record, harness.read_answers(folder, questions, record.sampling.repeats))


def write_record(record: Record, folder: Path) -> None:
    """Write `run.json`."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    (folder / "run.json").write_text(text + "\n", encoding="utf-8")


def _load(benchmark: Benchmark, dataset: Path | None) -> list[Question]:
    if dataset:
        return read_questions(dataset)
    try:
        return benchmark.load()
    except OSError as error:  # what the hub's library raises without access is one, too
        raise OSError(f"{error}\nWithout access to the hub, give --from-dataset") from error


def _threads(server: EvaluatedServer, options: Namespace) -> int:
    """The requests at a time, so that none stays dense for want of room on the cache rank."""
    room = MOST_THREADS
    if server.info.get("cache_rank_gpus") and not options.dense:
        longest = PROMPT_TOKENS + options.max_tokens
        room = server.most_sparse_requests(longest)
        if room == 0:
            raise ServerError(
                f"the cache rank holds {server.capacity_tokens} tokens and a request may have "
                f"{longest}: every request would stay dense. Lower --max-tokens"
            )
    return options.num_threads or min(MOST_THREADS, room)


def _warnings_of_steps(record: Record) -> list[str]:
    """What a reader has to know of the steps that were sparse, and of those that were not."""
    counters = record.counters.cache_rank
    steps = int(counters.get("steps", 0))
    if record.dense or not record.server.get("cache_rank_gpus"):
        stray = f"{steps} decode steps were sparse: other requests ran meanwhile"
        return [stray] if steps else []
    warnings = []
    if steps == 0:
        warnings.append(
            "no decode step was sparse: no request came beyond --sparse-threshold "
            f"{record.server['sparse_threshold']}, so that this is a dense run"
        )
    for reason, count in sorted(record.counters.dense_requests.items()):
        if count:
            remedy = ": lower --num-threads" if reason in _NO_ROOM else ""
            warnings.append(
                f"{count} requests beyond the threshold had dense steps ({reason}){remedy}"
            )
    if not record.server.get("enable_metrics"):
        warnings.append(
            "the server was started without --enable-metrics: how many requests stayed dense for "
            "want of room on the cache rank is not known"
        )
    if restarts := int(counters.get("starts", 0)):
        warnings.append(f"the cache rank was lost and started again, {restarts} times")
    return warnings
