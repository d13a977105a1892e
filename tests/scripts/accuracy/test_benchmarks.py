"""Benchmarks without a server: questions, the harness's command line, answers, comparisons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sgl_eval.cli import build_parser
from sgl_eval.predictions import PredictionsWriter
from sgl_eval.preset import resolve_run_inputs
from sgl_eval.registry import get
from sgl_eval.types import Example, Sample

from scripts import benchmark
from scripts.accuracy.benchmarks import harness
from scripts.accuracy.benchmarks.comparison import compare_folders, markdown, write_report
from scripts.accuracy.benchmarks.harness import Sampling
from scripts.accuracy.benchmarks.questions import (
    BENCHMARKS,
    Question,
    digest,
    math500_question,
    read_questions,
    write_questions,
)
from scripts.accuracy.benchmarks.runs import Record, read_run, write_record
from scripts.accuracy.benchmarks.server import Counters
from scripts.accuracy.pointer_chase import make_chain

CHAINS = Path("tests/data/pointer_chase.jsonl")
SERVER = {"model_path": "/models/Tiny", "reasoning_parser": "qwen3", "cache_rank_gpus": 0}

Answer = tuple[bool, int, str]  # is right, tokens, reason to finish


def make_questions(count: int) -> list[Question]:
    return [
        {"id": f"q{index}", "problem": f"What is {index}?", "expected_answer": str(index)}
        for index in range(count)
    ]


def make_run(
    out: Path, answers: Sequence[Sequence[Answer]], name: str = "aime25", **changes: Any
) -> Path:
    """A folder as `run` leaves it, of [questions][repeats] answers; the harness writes its part."""
    folder = out / name
    folder.mkdir(parents=True)
    questions = make_questions(len(answers))
    write_questions(questions, folder / "questions.jsonl")
    results = folder / "sgl_eval_aime25_20260101-000000"
    with PredictionsWriter(results, n_repeats=len(answers[0])) as write:
        for question, repeats in zip(questions, answers, strict=True):
            example = Example(question["id"], {}, question["expected_answer"])
            for repeat, (right, tokens, reason) in enumerate(repeats):
                times = {"generation_start_time": 10.0, "generation_end_time": 14.0}
                sample = Sample("text", tokens, finish_reason=reason, **times)
                write(example, repeat, sample, float(right), "1" if reason == "stop" else None)
    (results / "metrics.json").write_text("{}")
    settings: dict[str, Any] = {
        "benchmark": name,
        "command": [],
        "harness_command": [],
        "extra_body": {},
        "versions": {"sgl-eval": "0.1.3"},
        "questions": len(answers),
        "questions_sha256": digest(folder / "questions.jsonl"),
        "sampling": Sampling(repeats=len(answers[0])),
        "dense": False,
        "threads": 4,
        "server": SERVER,
    }
    write_record(Record(**{**settings, **changes}), folder)
    return out


def test_questions_survive_a_file(tmp_path: Path) -> None:
    # Characters at which Python, and not JSON, splits lines.
    questions = [{"id": "a", "problem": "x\u2028y\x0cz\n√2", "expected_answer": "1"}]
    write_questions(questions, tmp_path / "q.jsonl")
    assert read_questions(tmp_path / "q.jsonl") == questions


def test_questions_without_an_id_are_numbered(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"problem": "p", "expected_answer": 7, "level": 3}\n\n')
    assert read_questions(file) == [{"id": "own-0", "problem": "p", "expected_answer": "7"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"own.jsonl:1: not a JSON object"),
        ("[1]", r"own.jsonl:1: not a JSON object"),
        ('{"problem": "p"}', r"own.jsonl:1: .* needs the field 'expected_answer'"),
        ("", "holds no questions"),
        (
            '{"id": "a", "problem": "p", "expected_answer": 1}\n' * 2,
            r"own.jsonl:2: the id 'a' is used twice",
        ),
    ],
)
def test_malformed_questions_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_questions(file)


def test_aime_comes_with_the_harness(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "aime25.jsonl"
    assert benchmark.main(["questions", "aime25", "--out", str(file)]) == 0
    questions = read_questions(file)
    assert len(questions) == 30
    assert all(0 <= int(question["expected_answer"]) <= 999 for question in questions)
    assert digest(file) in capsys.readouterr().out


def test_a_row_of_math500_becomes_a_question() -> None:
    row = {
        "problem": "What is $1+1$?",
        "solution": "$\\boxed{2}$",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    }
    expected = {"id": "test/algebra/1.json", "problem": "What is $1+1$?", "expected_answer": "2"}
    assert math500_question(row) == expected


def test_the_chains_of_the_smoke_test_are_pointer_chases() -> None:
    chains = [make_chain(seed=seed, facts=128, hops=80) for seed in range(3)]
    assert read_questions(CHAINS) == [
        {
            "id": f"chain-{seed}",
            "problem": chain.prompt,
            "expected_answer": chain.answer[-1][1:],
        }
        for seed, chain in enumerate(chains)
    ]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_harness_understands_its_command_line(name: str, tmp_path: Path) -> None:
    sampling = Sampling(repeats=3, temperature=0.7, top_p=0.8, max_tokens=1234, thinking=False)
    command = harness.arguments(
        BENCHMARKS[name], CHAINS, None, tmp_path, "http://host:1", sampling, threads=5
    )
    arguments = build_parser().parse_args(command)
    inputs = resolve_run_inputs(arguments, get)
    assert inputs.base_url == "http://host:1/v1"
    assert (inputs.n_repeats, arguments.num_threads) == (3, 5)
    assert (inputs.gen.temperature, inputs.gen.top_p, inputs.gen.max_tokens) == (0.7, 0.8, 1234)
    assert inputs.gen.chat_template_kwargs == {"thinking": False, "enable_thinking": False}
    assert inputs.gen.seed is None
    multiple_choice = get(inputs.benchmark).category == "multichoice"
    assert multiple_choice == (name == "gpqa")


def test_repeats_of_one_greedy_answer_are_refused() -> None:
    assert Sampling(repeats=1, temperature=0).repeats == 1
    with pytest.raises(ValueError, match="one answer 16 times"):
        Sampling(repeats=16, temperature=0)


def test_what_the_command_line_cannot_say_goes_into_the_body() -> None:
    assert harness.extra_body(Sampling(repeats=1), dense=False) == {}
    body = harness.extra_body(Sampling(repeats=1, top_k=20), dense=True)
    assert body == {"top_k": 20, "custom_params": {"cache_rank": False}}


def test_answers_are_read_by_question_and_repeat(tmp_path: Path) -> None:
    answers = [
        [(True, 100, "stop"), (False, 200, "length")],
        [(False, 0, "error"), (True, 50, "stop")],
    ]
    run = read_run(make_run(tmp_path, answers) / "aime25")
    expected = pd.DataFrame(
        {
            "correct": [1, 0, np.nan, 1],
            "tokens": [100, 200, np.nan, 50],
            "seconds": [4, 4, np.nan, 4],
            "truncated": [False, True, False, False],
            "unanswered": [False, True, False, False],
            "failed": [False, False, True, False],
        },
        index=pd.Index(["q0", "q0", "q1", "q1"], name="id"),
    )
    pd.testing.assert_frame_equal(run.answers, expected)


def test_a_run_that_was_cut_short_is_not_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [[(True, 1, "stop")]] * 3) / "aime25"
    (predictions,) = folder.glob("sgl_eval_*/output-rs0.jsonl")
    predictions.write_text("".join(predictions.open().readlines()[:2]))
    with pytest.raises(ValueError, match="2 of 3 answers: the run was cut short"):
        read_run(folder)
    (folder / predictions.parent.name / "metrics.json").unlink()
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
    easy, hard, pooled = report.comparisons
    assert (easy.benchmark, hard.benchmark, pooled.benchmark) == ("aime24", "aime25", "pooled")

    assert hard.baseline.accuracy.value == hard.system.accuracy.value == 0.5
    assert hard.accuracy_difference.value == 0
    # Resampled questions: all may be the first, or all the second.
    assert (hard.accuracy_difference.low, hard.accuracy_difference.high) == (-0.5, 0.5)
    assert (hard.gained, hard.lost) == (1, 1)
    assert hard.baseline.tokens.value == 200
    assert hard.tokens_ratio.value == pytest.approx((350 + 100 + 300) / 600)
    assert hard.baseline.tokens_per_right_answer == pytest.approx(1200 / 3)
    assert hard.system.truncated == pytest.approx(1 / 6)
    assert hard.system.unanswered == pytest.approx(1 / 6)
    assert hard.baseline.seconds == 4

    assert (easy.questions, easy.repeats, easy.accuracy_difference) == (2, 1, (0, 0, 0))
    assert (pooled.questions, pooled.baseline.accuracy.value) == (5, pytest.approx(0.7))


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
        ({"sampling": Sampling(repeats=1, max_tokens=4096)}, "max_tokens is 32768 and 4096"),
        ({"server": {**SERVER, "reasoning_parser": None}}, "reasoning_parser is 'qwen3' and None"),
        ({"server": {**SERVER, "model_path": "/models/Other"}}, "model is 'Tiny' and 'Other'"),
        ({"versions": {"sgl-eval": "0.1.4"}}, "harness is 'sgl-eval 0.1.3'"),
    ],
)
def test_runs_of_different_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    answers = [[(True, 1, "stop")]] * 2
    dense = make_run(tmp_path / "dense", answers)
    with pytest.raises(ValueError, match=message):
        compare_folders(dense, make_run(tmp_path / "other", answers, **changes))


def test_runs_of_different_questions_are_refused(tmp_path: Path) -> None:
    answer = [(True, 1, "stop")]
    dense = make_run(tmp_path / "dense", [answer] * 2)
    with pytest.raises(ValueError, match="questions is 2 and 3; questions_sha256"):
        compare_folders(dense, make_run(tmp_path / "more", [answer] * 3))
    with pytest.raises(FileNotFoundError, match="do not both have a run of aime24, aime25"):
        compare_folders(dense, make_run(tmp_path / "else", [answer] * 2, "aime24"))
    (dense / "aime25" / "questions.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="not the file that the questions were asked from"):
        read_run(dense / "aime25")


def test_a_report_shows_figures_settings_and_warnings(tmp_path: Path) -> None:
    right, wrong = (True, 100, "stop"), (False, 300, "stop")
    dense = make_run(tmp_path / "dense", [[right, right]] * 4)
    sparse = make_run(
        tmp_path / "sparse",
        [[right, wrong]] * 4,
        server={**SERVER, "cache_rank_gpus": 1, "sparse_budget": 2048},
        counters=Counters({"steps": 9}),
        warnings=["the cache rank was lost and started again, 1 times"],
    )
    report = compare_folders(dense, sparse)
    text = markdown(report)
    assert "| aime25 | 4 × 2 | 100.0% [100.0, 100.0] | 50.0% [50.0, 50.0] " in text
    assert "-50.0 [-50.0, -50.0] | 0 / 4 |" in text
    assert "| aime25 | sparse | 200 | 2.000 [2.000, 2.000] | 400 |" in text
    assert "- sparse, aime25: the cache rank was lost" in text
    assert "| sparse_budget | `null` | `2048` |" in text
    assert "| max_tokens | `32768` |" in text
    assert "| aime25 | steps | 0 | 9 |" in text
    assert "pooled" not in text

    assert benchmark.main(["compare", str(dense), str(sparse), "--out", str(tmp_path / "r")]) == 0
    files = write_report(report, tmp_path / "r")
    assert [file.name for file in files] == [
        "comparison.json",
        "comparison.md",
        "comparison.png",
    ]
    (written,) = json.loads(files[0].read_text())["comparisons"]
    assert written["accuracy_difference"] == [-0.5, -0.5, -0.5]
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_errors_are_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = ["run", "custom", "--base-url", "http://127.0.0.1:9/v1", "--out", str(tmp_path)]
    assert benchmark.main(run) == 2
    assert "error: no server answers at http://127.0.0.1:9/health" in capsys.readouterr().err
    assert benchmark.main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} holds no runs\n"
    with pytest.raises(SystemExit):
        benchmark.main(["run", "gpqa", *run[1:], "--from-dataset", str(CHAINS)])
    assert "--from-dataset is of one benchmark" in capsys.readouterr().err
