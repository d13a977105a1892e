"""The parts of decode_text that need no server."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from scripts.decode_text import parse_options
from scripts.language.answer_report import make_report, markdown, write_report
from scripts.language.answers import Answer, AnswerRun, agreements
from scripts.language.comparison import Load, make_systems, server_flags
from scripts.language.decoding import Named, first_sparse, load_of
from scripts.language.forcing import Written
from scripts.language.tasks import Request
from scripts.shared.serving import ServerError
from scripts.shared.systems import System


def question(seed: int, system: str, tokens: list[int], ended: bool) -> Answer:
    return Answer(
        task="question",
        length=1024,
        seed=seed,
        depth=None,
        system=system,
        budget=None if system == "dense" else 64,
        opening=0 if system == "dense" else 2,
        tokens=tokens,
        ended=ended,
        text="",
        sparse_from=None if system == "dense" else 1,
    )


def needle(seed: int, length: int, system: str, exact: bool) -> Answer:
    return Answer(
        task="needle",
        length=length,
        seed=seed,
        depth=seed / 2,
        system=system,
        budget=None if system == "dense" else 64,
        opening=28,
        tokens=[0] * 30,
        ended=True,
        text="12345",
        sparse_from=None if system == "dense" else 19,
        exact=exact,
        right=int(exact),
        prefix=int(exact),
        words=1,
    )


ANSWERS = [
    question(0, "dense", [1, 2, 3, 4, 5, 6, 7, 8], ended=True),
    question(1, "dense", [1, 2, 3, 3, 3, 3, 3, 3], ended=False),
    question(0, "quest", [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9], ended=True),
    question(1, "quest", [1, 2, 3, 3, 3, 3, 3, 3], ended=False),
    *(needle(seed, length, "dense", length == 1024) for seed in (0, 1) for length in (1024, 2048)),
    *(needle(seed, length, "quest", seed == 0) for seed in (0, 1) for length in (1024, 2048)),
]

RUN = AnswerRun(
    commands=["python -m scripts.decode_text"],
    machine={"cpus": 2},
    model="smollm2",
    settings={"sink_tokens": 4},
    failures={"oracle:sparse_budget=64": "it ended"},
    lengths=[1024, 2048],
    problems=2,
    opening=2,
    max_tokens=12,
    texts={"opticks": "ab" * 32},
)


def test_answers_are_compared_behind_their_opening() -> None:
    (found,) = agreements(ANSWERS, "question")
    assert found.same == [2, None]
    assert found.median_same is None
    assert found.ratios == [12 / 8]  # of the only request that was ended twice
    assert found.repetition == [pytest.approx(4 / 7), pytest.approx(2 / 3)]
    assert found.dense_repetition == [0, pytest.approx(2 / 3)]


def test_a_report_has_tables_and_plots(tmp_path: Path) -> None:
    report = make_report(RUN, ANSWERS)
    files = write_report(report, tmp_path)
    plots = {path.name for path in files if path.suffix == ".png"}
    assert plots == {"accuracy-length.png", "answers.png"}
    text = markdown(report)
    assert "| quest | 64 | 2 | all | 0.50 | 10 | 8 | 1.50 of 1 | 1 | 1 |" in text
    # Dense decoding makes none of 2048 tokens, where the others tell nothing therefore.
    assert "| dense | – | 2 of 2 (1.00) | (0 of 2 (0.00)) |" in text
    assert "| quest | 64 | 1 of 2 (0.50) | (1 of 2 (0.50)) |" in text
    assert "| quest | 64 | 19 | 2 |" in text
    assert "oracle:sparse_budget=64: it ended" in text
    answers = json.loads((tmp_path / "results.json").read_text())["answers"]
    assert msgspec.convert(answers, list[Answer]) == ANSWERS


def test_a_server_turns_sparse_at_the_shortest_prompt() -> None:
    options = parse_options(
        "--out x --gpus --systems cache-rank --budgets 9 --model bundled".split()
    )
    (system,) = make_systems(options)
    requests = [
        Named(("copy", length, 0), Request([0] * length, [0] * 30, 50)) for length in (1024, 2048)
    ]
    load = load_of([*requests] * 4, 8)
    assert load == Load(8, 8 * 2128, 1024)
    flags = server_flags(system, options, load)
    last = len(flags) - 1 - flags[::-1].index("--sparse-threshold")
    assert flags[last + 1] == "1024"
    last = len(flags) - 1 - flags[::-1].index("--max-running-requests")
    assert flags[last + 1] == "9"  # one counts twice in chunks


def test_the_first_token_behind_the_opening_is_sparse() -> None:
    key = ("needle", 1024, 0)
    written = Written([0] * 40, True, {"sparse_steps": 21, "dense_reason": None})
    # 40 tokens and the end, of which 21 were sparse.
    assert first_sparse(System.parse("cache-rank"), written, 20, key) == 20
    with pytest.raises(ServerError, match="dense for 20 tokens"):
        first_sparse(System.parse("cache-rank"), written, 19, key)
    assert first_sparse(System.parse("quest"), written, 19, key) == 1
    assert first_sparse(System.parse("dense"), written, 19, key) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--problems 1", "--problems must be at least 2"),
        ("--opening 0", "must be at least 1"),
        ("--max-tokens 24", "--max-tokens must be more than --opening"),
        ("--budgets 0", "--budgets must be at least 1"),
        ("--model-path nowhere", "no model 'nowhere'"),
    ],
)
def test_wrong_options_are_refused(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--out", "x", "--gpus", "--model", "bundled", *arguments.split()])
    assert reason in capsys.readouterr().err
