"""The command line of sgl-eval, and why each option is set.

Everything that its defaults would get wrong for a comparison of two systems is decided here. The
reasons were read in version 0.1.3, the one that the extra `eval` installs.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MATH500 = "HuggingFaceH4/MATH-500"


class Benchmark(NamedTuple):
    """One benchmark.

    Attributes:
        harness: the harness's benchmark that prompts and grades it. All of its mathematics
            benchmarks share a prompt and a grader, so that MATH-500, which it does not list, runs
            under the name of one of them.
        repeats: answers to each question by default: the fewer questions, the more.
    """

    harness: str
    repeats: int


BENCHMARKS = {
    "aime24": Benchmark("aime24", 16),
    "aime25": Benchmark("aime25", 16),
    "aime26": Benchmark("aime26", 16),
    "gpqa": Benchmark("gpqa", 8),
    "math500": Benchmark("aime25", 4),
    "custom": Benchmark("aime25", 1),
}
"""By their names on our command line; `custom` is problems of one's own, with answers as in MATH.
The years of AIME come with the harness; GPQA Diamond and MATH-500 come from the hub."""


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


def arguments(options: Namespace, url: str, folder: Path, threads: int) -> list[str]:
    """The arguments of `sgl-eval`, which makes a folder in `folder`."""
    benchmark = BENCHMARKS[options.benchmark]
    thinking = json.dumps(not options.no_thinking)
    command = ["run", benchmark.harness, "--base-url", f"{url}/v1", "--out-dir", str(folder)]
    # No --seed: the harness would send the same one for all repeats.
    command += ["--n-repeats", str(options.n_repeats or benchmark.repeats)]
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
        command += ["--from-dataset", str(write_math500(_math500_of_hub(), folder))]
    return command


def extra_body(options: Namespace) -> dict[str, Any]:
    """What every request holds beyond the options of the harness's command line."""
    body: dict[str, Any] = {}
    if options.top_k is not None:
        body["top_k"] = options.top_k
    if options.dense:
        body["custom_params"] = {"cache_rank": False}
    return body


def run_harness(command: list[str], body: Mapping[str, Any]) -> int:
    """Run `sgl-eval` in this process; its exit status.

    It shows progress, writes every answer as it comes, and ends at Ctrl-C with what it has. The
    command line has no option for the body; the benchmark's defaults do.
    """
    from sgl_eval import cli, registry

    spec = registry.get(command[1])
    spec.default_gen = dataclasses.replace(spec.default_gen, extra_body=dict(body) or None)
    return int(cli.main(command))


def read_results(folder: Path) -> tuple[dict[str, Any], list[Answer]]:
    """Read what the harness wrote: its metrics, among them how it sampled, and all answers.

    Raises:
        FileNotFoundError: the harness wrote no results.
        ValueError: it was interrupted. The answers that it has are the short ones, and their mean
            is no estimate of anything.
    """
    found = next(iter(sorted(folder.glob("sgl_eval_*/metrics.json"))), None)
    if found is None:
        raise FileNotFoundError(f"{folder}: the run ended before the harness wrote its results")
    metrics: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    if metrics.get("partial"):
        raise ValueError(f"{found.parent}: the run was cut short")
    answers: list[Answer] = []
    for file in sorted(found.parent.glob("output-rs*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            answers += [_answer(json.loads(line)) for line in lines]
    return metrics, answers


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


def _math500_of_hub() -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        return list(load_dataset(MATH500, split="test"))
    except OSError as error:  # what the hub's library raises without access is one, too
        raise OSError(f"{error}\nWithout access to the hub, give --from-dataset") from error


def write_math500(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write the questions of MATH-500, of rows as the hub has them, for the harness to read."""
    path = folder / "questions.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            question = {
                "id": row["unique_id"],  # path of the problem in MATH: test/algebra/1072.json
                "problem": row["problem"],
                "expected_answer": row["answer"],
            }
            file.write(json.dumps(question, ensure_ascii=False) + "\n")
    return path
