"""Benchmarks without a server: the harness's command line, answers, comparisons."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sgl_eval.cli import build_parser
from sgl_eval.predictions import PredictionsWriter
from sgl_eval.preset import resolve_run_inputs
from sgl_eval.registry import get
from sgl_eval.types import Example, Sample

from scripts import benchmark
from scripts.accuracy import runs
from scripts.accuracy.comparison import compare_folders
from scripts.accuracy.pointer_chase import make_chain
from scripts.accuracy.runs import BENCHMARKS, Answer, Record, read_run, write_record

CHAINS = Path("tests/data/pointer_chase.jsonl")
SERVER = {"model_path": "/models/Tiny", "reasoning_parser": "qwen3", "cache_rank_gpus": 0}
GEN = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 32768, "extra_body": None}

GradedAnswer = tuple[bool, int, str]  # is right, tokens, reason to finish


def make_run(
    out: Path,
    answers: Sequence[Sequence[GradedAnswer]],
    name: str = "aime25",
    metrics: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A folder as `run` leaves it, of [questions][repeats] answers; the harness writes its part."""
    folder = out / name
    results = folder / "sgl_eval_aime25_20260101-000000"
    with PredictionsWriter(results, n_repeats=len(answers[0])) as write:
        for question, repeats in enumerate(answers):
            problem = {"problem": f"What is {question}?"}
            example = Example(f"q{question}", problem, str(question))
            for repeat, (right, tokens, reason) in enumerate(repeats):
                sample = Sample("text", tokens, finish_reason=reason)
                write(example, repeat, sample, float(right), "1" if reason == "stop" else None)
    found = {"gen": GEN, "n_repeats": len(answers[0]), "sgl_eval_version": "0.1.3"}
    (results / "metrics.json").write_text(json.dumps({**found, **(metrics or {})}))
    settings = {"benchmark": name, "command": "", "dense": False, "server": SERVER}
    write_record(Record(**{**settings, **changes}), folder)
    return out


def options_of(*arguments: str) -> Namespace:
    common = ["--base-url", "http://host:1", "--out", "out"]
    return benchmark.parse_options(["run", *arguments, *common])


def test_the_chains_of_the_smoke_test_are_pointer_chases() -> None:
    chains = [make_chain(seed=seed, facts=128, hops=80) for seed in range(3)]
    for seed, line in enumerate(CHAINS.read_text().splitlines()):
        answer = chains[seed].answer[-1][1:]
        expected = {
            "id": f"chain-{seed}",
            "problem": chains[seed].prompt,
            "expected_answer": answer,
        }
        assert json.loads(line) == expected


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_harness_understands_its_command_line(name: str, tmp_path: Path) -> None:
    arguments = "--n-repeats 3 --temperature 0.7 --top-p 0.8 --max-tokens 1234 --no-thinking"
    options = options_of(name, "--from-dataset", str(CHAINS), *arguments.split())
    command = runs.arguments(options, "http://host:1", tmp_path, threads=5)
    parsed = build_parser().parse_args(command)
    inputs = resolve_run_inputs(parsed, get)
    assert inputs.base_url == "http://host:1/v1"
    assert (inputs.n_repeats, parsed.num_threads) == (3, 5)
    assert (inputs.gen.temperature, inputs.gen.top_p, inputs.gen.max_tokens) == (0.7, 0.8, 1234)
    assert inputs.gen.chat_template_kwargs == {"thinking": False, "enable_thinking": False}
    assert inputs.gen.seed is None
    multiple_choice = get(inputs.benchmark).category == "multichoice"
    assert multiple_choice == (name == "gpqa")


def test_answers_are_read_by_question_and_repeat(tmp_path: Path) -> None:
    answers = [
        [(True, 100, "stop"), (False, 200, "length")],
        [(False, 0, "error"), (True, 50, "stop")],
    ]
    run = read_run(make_run(tmp_path, answers) / "aime25")
    first, second = ("q0", "What is 0?", "0"), ("q1", "What is 1?", "1")
    assert run.answers == [
        Answer(*first, True, 100, False, False, False),
        Answer(*second, False, 0, False, False, True),
        Answer(*first, False, 200, True, True, False),
        Answer(*second, True, 50, False, False, False),
    ]


def test_a_comparison_is_of_differences_within_questions(tmp_path: Path) -> None:
    right, wrong, cut = (True, 100, "stop"), (False, 300, "stop"), (False, 600, "length")
    dense = make_run(tmp_path / "dense", [[right, right], [right, wrong], [wrong, wrong]])
    sparse = make_run(tmp_path / "sparse", [[right, cut], [right, right], [wrong, wrong]])
    make_run(tmp_path / "dense", [[right]] * 2, "aime24")
    make_run(tmp_path / "sparse", [[right]] * 2, "aime24")
    report = compare_folders(dense, sparse)
    assert report.names == ("dense", "sparse")
    easy, hard = report.comparisons
    assert (easy.benchmark, hard.benchmark) == ("aime24", "aime25")

    assert hard.baseline.accuracy.value == hard.system.accuracy.value == 0.5
    assert hard.accuracy_difference.value == 0
    # Resampled questions: all may be the first, or all the second.
    assert (hard.accuracy_difference.low, hard.accuracy_difference.high) == (-0.5, 0.5)
    assert (hard.gained, hard.lost) == (1, 1)
    assert hard.baseline.tokens.value == 200
    assert hard.tokens_ratio.value == pytest.approx((350 + 100 + 300) / 600)
    assert hard.system.truncated == pytest.approx(1 / 6)
    assert hard.system.unanswered == pytest.approx(1 / 6)

    assert (easy.questions, easy.repeats, easy.accuracy_difference) == (2, 1, (0, 0, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": {"gen": {**GEN, "max_tokens": 4096}}}, "max_tokens is 32768 and 4096"),
        ({"metrics": {"gen": {**GEN, "extra_body": {"top_k": 20}}}}, "top_k is None and 20"),
        ({"server": {**SERVER, "reasoning_parser": None}}, "reasoning_parser is 'qwen3' and None"),
        ({"server": {**SERVER, "model_path": "/models/Other"}}, "model is 'Tiny' and 'Other'"),
        ({"metrics": {"sgl_eval_version": "0.1.4"}}, "harness is 'sgl-eval 0.1.3'"),
        ({"metrics": {"prompt": {"yaml": "user: x"}}}, "prompt is None and 'user: x'"),
    ],
)
def test_runs_of_different_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    answers = [[(True, 1, "stop")]] * 2
    dense = make_run(tmp_path / "dense", answers)
    with pytest.raises(ValueError, match=message):
        compare_folders(dense, make_run(tmp_path / "other", answers, **changes))


def test_a_run_that_was_asked_to_stay_dense_is_compared(tmp_path: Path) -> None:
    answers = [[(True, 1, "stop")]] * 2
    body = {"custom_params": {"cache_rank": False}}
    dense = make_run(tmp_path / "dense", answers, metrics={"gen": {**GEN, "extra_body": body}})
    assert compare_folders(dense, make_run(tmp_path / "other", answers)).comparisons
