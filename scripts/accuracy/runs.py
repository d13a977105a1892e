"""One benchmark on one server, and the folder that it leaves.

Prompts, answers and grades are those of sgl-eval, SGLang's own evaluation client, whose graders are
NVIDIA NeMo-Skills'.

OUT/BENCHMARK/run.json           what was asked of which server, and what it says of the run
OUT/BENCHMARK/sgl_eval_*/        the harness's answers and metrics

Everything that the harness's defaults would get wrong for a comparison of two systems is decided
here. The reasons were read in version 0.1.3, the one that the extra `eval` installs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from scripts.shared.command import UsageError
from scripts.shared.serving import Client, ServerError, cache_rank_state

BENCHMARKS = {
    "aime24": ("aime24", 16),
    "aime25": ("aime25", 16),
    "aime26": ("aime26", 16),
    "gpqa": ("gpqa", 8),
    "math500": ("aime25", 4),
    "custom": ("aime25", 1),
}
"""The benchmark of the harness that prompts and grades, and how many answers each question has.

The years of AIME come with the harness; GPQA Diamond and MATH-500 come from the hub. It has
one prompt and one grader for all mathematics, so that MATH-500, which it does not list, runs under
the name of another. `custom` is problems of one's own, with answers as in MATH."""

MOST_THREADS = 64
PROMPT_TOKENS = 2048
"""A question is taken to have so many tokens where requests at a time are counted."""

_HIDDEN = ("api_key", "admin_api_key", "ssl_keyfile_password", "internal_states")
_DENSE_REQUESTS = re.compile(
    r'^sglang_cache_rank_dense_requests_total\{.*reason="(\w+)".*\} (\S+)$', re.MULTILINE
)
_GROWING = ("steps", "tokens_shipped", "steps_waited", "wait_seconds", "retractions", "starts")
"""These parts of the cache rank's state only grow."""


class Answer(msgspec.Struct, frozen=True):
    """One answer to one question, as the harness graded it."""

    question: str  # id
    problem: str
    expected: str
    is_right: bool
    tokens: int  # its thinking included
    is_truncated: bool  # it reached the most tokens
    is_unanswered: bool  # nothing in it could be read as an answer
    has_failed: bool  # the request failed; nothing else counts


class Record(msgspec.Struct):
    """What was run; `run.json`."""

    benchmark: str  # its name on our command line
    command: str
    dense: bool  # requests asked to stay dense
    server: dict[str, Any]  # what `/server_info` said, less secrets and internal states
    counters: dict[str, float] = {}  # what the cache rank counted meanwhile; empty without one
    # By reason, requests beyond the sparse threshold that had a step which stayed dense; empty
    # where the server does not export metrics.
    dense_requests: dict[str, int] = {}
    warnings: list[str] = []  # what a reader of the results has to know


class Run(NamedTuple):
    """A finished run."""

    folder: Path
    record: Record
    metrics: dict[str, Any]  # the harness's
    answers: list[Answer]


class EvaluatedServer(Client):
    """A server that answers benchmarks."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        info = self.read("/server_info")
        # Of the cache rank, 0 without one; and of a request, its answer included.
        self.capacity_tokens = int(cache_rank_state(info).get("capacity_tokens", 0))
        self.context_length = int(self.read("/v1/models")["data"][0]["max_model_len"])
        self.info = {name: value for name, value in info.items() if name not in _HIDDEN}

    def most_sparse_requests(self, request_tokens: int) -> int:
        """The requests of this length, answer included, that the cache rank can hold at once.

        A request reserves the memory of its longest possible answer; one for which there is no room
        or no working set stays dense until there is.
        """
        length = min(request_tokens, self.context_length) + 1
        return min(int(self.info["max_sparse_requests"]), self.capacity_tokens // length)

    def counters(self) -> tuple[Counter[str], Counter[str]]:
        """Counters of the cache rank, and of dense requests, which take --enable-metrics."""
        state = self.cache_rank()
        text = self.get("/metrics").text if self.info.get("enable_metrics") else ""
        dense = {reason: int(float(count)) for reason, count in _DENSE_REQUESTS.findall(text)}
        return Counter({name: state[name] for name in _GROWING if name in state}), Counter(dense)


def run_benchmark(options: Namespace, command: str) -> Record:
    """Ask a server every question of a benchmark, and keep the answers.

    InterruptedError if the harness did not end well; what it has is kept. ServerError if the
    benchmark means nothing on this server. Nothing is written over: FileExistsError.
    """
    importlib.import_module("sgl_eval")  # before a folder is made
    server = EvaluatedServer(options.base_url)
    folder: Path = options.out / options.benchmark
    threads = _threads(server, options)
    folder.mkdir(parents=True)
    record = Record(options.benchmark, command, options.dense, server.info)
    before = server.counters()
    status = run_harness(arguments(options, server.url, folder, threads), options)
    counters, dense_requests = server.counters()
    counters.subtract(before[0])
    record.counters, record.dense_requests = dict(counters), dict(dense_requests - before[1])
    record.warnings = _warnings(record, options)
    write_record(record, folder)
    if status:
        raise InterruptedError(f"the harness ended with status {status}; see {folder}")
    return record


def arguments(options: Namespace, url: str, folder: Path, threads: int) -> list[str]:
    """The arguments of `sgl-eval`, which makes a folder in `folder`."""
    name, repeats = BENCHMARKS[options.benchmark]
    thinking = json.dumps(not options.no_thinking)
    command = ["run", name, "--base-url", f"{url}/v1", "--out-dir", str(folder)]
    # No --seed: the harness would send the same one for all repeats.
    command += ["--n-repeats", str(options.n_repeats or repeats)]
    # The harness's own temperature is 0, at which all repeats are one answer.
    command += ["--temperature", str(options.temperature), "--top-p", str(options.top_p)]
    # Unset, an answer would be as long as the server lets it.
    command += ["--max-tokens", str(options.max_tokens), "--num-threads", str(threads)]
    # The harness sends `thinking`; the templates of Qwen3 read `enable_thinking`.
    command += ["--no-thinking" if options.no_thinking else "--thinking"]
    command += ["--chat-template-kwarg", f"enable_thinking={thinking}"]
    if options.num_examples:
        command += ["--num-examples", str(options.num_examples)]
    if options.prompt:
        command += ["--prompt", str(options.prompt)]
    if options.from_dataset:
        command += ["--from-dataset", str(options.from_dataset)]
    elif options.benchmark == "math500":
        command += ["--from-dataset", str(_write_math500(folder))]
    return command


def run_harness(command: list[str], options: Namespace) -> int:
    """Run `sgl-eval` in this process; its exit status.

    It shows progress, writes every answer as it comes, and ends at Ctrl-C with what it has. The
    command line has no option for the body of requests; the benchmark's defaults do.
    """
    from sgl_eval import cli, registry

    print(shlex.join(["sgl-eval", *command]))
    body: dict[str, Any] = {}
    if options.top_k is not None:
        body["top_k"] = options.top_k
    if options.dense:
        body["custom_params"] = {"cache_rank": False}
    spec = registry.get(command[1])
    spec.default_gen = dataclasses.replace(spec.default_gen, extra_body=body or None)
    return int(cli.main(command))


def read_run(folder: Path) -> Run:
    """Read what `run_benchmark` left.

    UsageError if it was interrupted: the answers that it has are the short ones, and their mean is
    no estimate of anything.
    """
    record = msgspec.json.decode((folder / "run.json").read_bytes(), type=Record)
    found = next(iter(sorted(folder.glob("sgl_eval_*/metrics.json"))), None)
    if found is None:
        raise FileNotFoundError(f"{folder}: the run ended before the harness wrote its results")
    metrics: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    if metrics.get("partial"):
        raise UsageError(f"{found.parent}: the run was cut short")
    answers: list[Answer] = []
    for file in sorted(found.parent.glob("output-rs*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            answers += [_answer(json.loads(line)) for line in lines]
    return Run(folder, record, metrics, answers)


def _answer(row: Mapping[str, Any]) -> Answer:
    failed = row["finish_reason"] not in ("stop", "length")
    return Answer(
        row["id"],
        row["problem"],
        row["expected_answer"],
        bool(row["symbolic_correct"]),
        row["num_generated_tokens"],
        row["finish_reason"] == "length",
        row["predicted_answer"] is None and not failed,
        failed,
    )


def _write_math500(folder: Path) -> Path:
    """Write the questions of MATH-500, which the hub has, for the harness to read."""
    from datasets import load_dataset

    try:
        rows = load_dataset("HuggingFaceH4/MATH-500", split="test")
    except OSError as error:  # what the hub's library raises without access is one, too
        raise OSError(f"{error}\nWithout access to the hub, give --from-dataset") from error
    # The id is the path of the problem in MATH: test/algebra/1072.json
    names = {"id": "unique_id", "problem": "problem", "expected_answer": "answer"}
    questions = ({ours: row[theirs] for ours, theirs in names.items()} for row in rows)
    path = folder / "questions.jsonl"
    lines = (json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_record(record: Record, folder: Path) -> None:
    """Write `run.json`."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    (folder / "run.json").write_text(text + "\n", encoding="utf-8")


def _threads(server: EvaluatedServer, options: Namespace) -> int:
    """The requests at a time, so that none stays dense for want of room on the cache rank."""
    if server.context_length < options.max_tokens + 1:
        raise ServerError(
            f"the server's requests have at most {server.context_length} tokens, prompt included: "
            f"no room for --max-tokens {options.max_tokens}"
        )
    if options.dense or not server.info.get("cache_rank_gpus"):
        return MOST_THREADS
    longest = PROMPT_TOKENS + options.max_tokens
    if room := server.most_sparse_requests(longest):
        return min(MOST_THREADS, room)
    raise ServerError(
        f"the cache rank holds {server.capacity_tokens} tokens and a request may have "
        f"{longest}: every request would stay dense. Lower --max-tokens"
    )


def _warnings(record: Record, options: Namespace) -> list[str]:
    """What a reader of the results has to know."""
    warnings, server, steps = [], record.server, int(record.counters.get("steps", 0))
    if not options.no_thinking and not server.get("reasoning_parser"):
        warnings.append(
            "the server has no --reasoning-parser: answers are read from within the thinking, also "
            "of an answer that was cut short"
        )
    if record.dense or not server.get("cache_rank_gpus"):
        if steps:
            warnings.append(f"{steps} decode steps were sparse: other requests ran meanwhile")
        return warnings
    if steps == 0:
        warnings.append(
            "no decode step was sparse: no request came beyond --sparse-threshold "
            f"{server['sparse_threshold']}, so that this is a dense run"
        )
    for reason, count in sorted(record.dense_requests.items()):
        warnings.append(f"{count} requests beyond the threshold had dense steps ({reason})")
    if not server.get("enable_metrics"):
        warnings.append("without --enable-metrics nobody knows how many requests stayed dense")
    if restarts := int(record.counters.get("starts", 0)):
        warnings.append(f"the cache rank was lost and started again, {restarts} times")
    return warnings
