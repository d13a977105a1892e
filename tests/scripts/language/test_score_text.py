"""The parts of score_text that need no server."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from scripts.language.report import Report, Score, TextRun, markdown
from scripts.score_text import parse_options, tokenize
from scripts.shared.report import write_report


def score(text: str, system: str, budget: int | None, kl: float) -> Score:
    return Score(
        text=text,
        system=system,
        budget=budget,
        attended=budget or 4096,
        kl=kl,
        nll_difference=kl / 2,
        top1_agreement=0.9,
        ratio_mean=0.8,
        ratio_p5=0.3,
        largest_difference=1.5,
        sparse_from=1,
    )


RUN = TextRun(
    commands=["python -m scripts.score_text"],
    machine={"cpus": 2},
    model="smollm2",
    settings={"sink_tokens": 4},
    context=4096,
    scored=256,
    warm_up=24,
    texts={"opticks": "ab" * 32, "regex": "cd" * 32},
    failures={"quest:sparse_budget=64": "it ended"},
)

SCORES = [
    score("opticks", "cache-rank:kv_residency=hack", 64, 0.3),
    score("opticks", "cache-rank", 128, 0.2),
    score("opticks", "cache-rank", 64, 0.25),
    score("regex", "cache-rank", 64, 0.35),
    score("opticks", "oracle", 64, 0.01),
]


def test_a_report_has_tables(tmp_path: Path) -> None:
    report = Report(RUN, SCORES)
    write_report(tmp_path, "results", report, markdown(report))
    text = (tmp_path / "results.md").read_text()
    assert "| cache-rank | 64 | 64 | 0.3000 [0.2500, 0.3500] |" in text
    assert "| oracle | 64 | 0.0100 |  |" in text  # by text
    assert "quest:sparse_budget=64 failed: it ended" in text
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert {"text", "system", "budget", "kl", "ratio_p5"} <= set(cells[0])
    assert msgspec.convert(cells, list[Score]) == SCORES


@pytest.mark.language_model
def test_a_short_text_is_refused(language_model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short. " * 10)
    options = parse_options(
        ["--out", "x", "--gpus", "--model-path", str(language_model), "--text", str(short)]
    )
    with pytest.raises(ValueError, match=r"short: has \d+ tokens, and 4096 are needed"):
        tokenize(options)
