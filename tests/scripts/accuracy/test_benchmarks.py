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
from scripts.accuracy.benchmarks import harness
from scripts.accuracy.benchmarks.comparison import compare_folders
from scripts.accuracy.benchmarks.harness import BENCHMARKS, Answer
from scripts.accuracy.benchmarks.runs import Record, read_run, write_record
from scripts.accuracy.pointer_chase import make_chain

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


def test_a_row_of_math500_becomes_a_question(tmp_path: Path) -> None:
    row = {
        "problem": "What is $1+1$?",
        "solution": "$\\boxed{2}$",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    }
    # Characters at which Python, and not JSON, splits lines.
    other = {"unique_id": "a", "problem": "x\u2028y\x0cz\n√2", "answer": "1"}
    found = harness.write_math500([row, other], tmp_path).read_text("utf-8").split("\n")
    assert [json.loads(line) for line in found[:-1]] == [
        {"id": "test/algebra/1.json", "problem": "What is $1+1$?", "expected_answer": "2"},
        {"id": "a", "problem": "x\u2028y\x0cz\n√2", "expected_answer": "1"},
    ]


def test_the_chains_of_the_smoke_test_are_pointer_chases() -> None:
    chains = [make_chain(seed=seed, facts=128, hops=80) for seed in range(3)]
    assert [json.loads(line) for line in CHAINS.read_text().splitlines()] == [
        {
            "id": f"chain-{seed}",
            "problem": chain.prompt,
            "expected_answer": chain.answer[-1][1:],
        }
        for seed, chain in enumerate(chains)
    ]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_harness_understands_its_command_line(name: str, tmp_path: Path) -> None:
    arguments = "--n-repeats 3 --temperature 0.7 --top-p 0.8 --max-tokens 1234 --no-thinking"
    options = options_of(name, "--from-dataset", str(CHAINS), *arguments.split())
    command = harness.arguments(options, "http://host:1", tmp_path, threads=5)
    parsed = build_parser().parse_args(command)
    inputs = resolve_run_inputs(parsed, get)
    assert inputs.base_url == "http://host:1/v1"
    assert (inputs.n_repeats, parsed.num_threads) == (3, 5)
    assert (inputs.gen.temperature, inputs.gen.top_p, inputs.gen.max_tokens) == (0.7, 0.8, 1234)
    assert inputs.gen.chat_template_kwargs == {"thinking": False, "enable_thinking": False}
    assert inputs.gen.seed is None
    multiple_choice = get(inputs.benchmark).category == "multichoice"
    assert multiple_choice == (name == "gpqa")


def test_what_the_command_line_cannot_say_goes_into_the_body() -> None:
    assert harness.extra_body(options_of("aime24")) == {}
    body = harness.extra_body(options_of("aime24", "--top-k", "20", "--dense"))
    assert body == {"top_k": 20, "custom_params": {"cache_rank": False}}


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


def test_a_run_that_was_cut_short_is_not_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [[(True, 1, "stop")]] * 3, metrics={"partial": True}) / "aime25"
    with pytest.raises(ValueError, match="the run was cut short"):
        read_run(folder)
    next(folder.glob("sgl_eval_*/metrics.json")).unlink()
    with pytest.raises(FileNotFoundError, match="ended before the harness wrote"):
        read_run(folder)


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


def test_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    right, failed = (True, 100, "stop"), (False, 0, "error")
    dense = make_run(tmp_path / "dense", [[right, right]] * 2)
    sparse = make_run(tmp_path / "sparse", [[right, failed], [right, right]])
    (comparison,) = compare_folders(dense, sparse).comparisons
    assert comparison.system.accuracy.value == 1
    assert comparison.system.tokens.value == 100
    assert comparison.system.failed == 0.25
    broken = make_run(tmp_path / "broken", [[failed, failed], [right, right]])
    with pytest.raises(ValueError, match="every request of a question failed"):
        compare_folders(dense, broken)


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


def test_runs_of_different_questions_are_refused(tmp_path: Path) -> None:
    answer = [(True, 1, "stop")]
    dense = make_run(tmp_path / "dense", [answer] * 2)
    with pytest.raises(ValueError, match="number of questions is 2 and 3; questions is"):
        compare_folders(dense, make_run(tmp_path / "more", [answer] * 3))
    with pytest.raises(FileNotFoundError, match="do not both have a run of aime24, aime25"):
        compare_folders(dense, make_run(tmp_path / "else", [answer] * 2, "aime24"))


def test_errors_are_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = ["run", "custom", "--base-url", "http://127.0.0.1:9/v1", "--out", str(tmp_path)]
    assert benchmark.main(run) == 2
    assert "error: no server answers at http://127.0.0.1:9/server_info" in capsys.readouterr().err
    assert benchmark.main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} holds no runs\n"
