"""Divergence against the time of a step, from records as score_text and profile_tpot write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.language.records import ReadText, Score, TextRun
from scripts.language.records import Report as TextReport
from scripts.language.report import write_report
from scripts.plan import make_planner
from scripts.plot import main
from scripts.speed.jobs import Settings, Shape, Wish, make_job
from scripts.speed.records import Measurement, Results, summarize
from scripts.speed.report import write_results

MODEL = "qwen3-8b"
SHAPE = Shape(8, 32768)
CALIBRATED = "cache-rank:calibration=somewhere"

STEPS = {
    "dense": 14.0,
    "quest:sparse_budget=512": 7.5,
    "quest:sparse_budget=1024": 7.8,
    "window": 6.2,  # with the budget of the run
    "cache-rank:sparse_budget=1024": 6.3,
    "floor": 6.0,
}
"""Milliseconds of a step of each system."""

KL = {("quest", 64): 0.2, ("quest", 128): 0.1, ("window", 128): 0.3, (CALIBRATED, 128): 0.02}
"""Divergence of each system and budget on the first text."""


def score(text: str, system: str, budget: int, kl: float) -> Score:
    return Score(text, system, budget, 200, 64, kl, kl, 0.9, 0.8, 0.3, 1.0, 1, [kl])


def texts(folder: Path) -> Path:
    """A record of two texts, the second of which diverges three times as far."""
    names = {"opticks": 1, "regex": 3}
    run = TextRun(
        commands=["python -m scripts.score_text"],
        machine={"cpus": 2, "gpus": [], "torch": "2.11"},
        model="smollm2",
        settings={"recent_tokens": 64},
        context=4096,
        scored=64,
        warm_up=24,
        texts={name: ReadText("prose", "ab" * 32, 4096) for name in names},
    )
    scores = [
        score(text, system, budget, factor * kl)
        for text, factor in names.items()
        for (system, budget), kl in KL.items()
    ]
    folder.mkdir()
    write_report(TextReport(run, scores), folder)
    return folder


def speed(folder: Path, steps: dict[str, float] = STEPS) -> Path:
    """A record of one shape, with a step in four a millisecond longer than the others."""
    settings = Settings(sparse_budget=1024)
    jobs = [make_job(Wish(MODEL, system, (SHAPE,)), settings, folder) for system in steps]
    results = Results(command=["python", "-m", "scripts.profile_tpot"], jobs=jobs)
    results.machine = {"gpus": ["NVIDIA H200"], "sglang": "0.5.17"}
    for job in jobs:
        measured = Measurement(MODEL, job.system, job.shapes[0])
        ms = steps[job.system]
        summarize(measured, [ms / 1e3, ms / 1e3, ms / 1e3, (ms + 1) / 1e3] * 3, window=4)
        results.measurements.append(measured)
    write_results(results, folder)
    return folder


@pytest.fixture
def drawn(tmp_path: Path) -> Any:
    """Draw with some arguments; the points by curve, and the files by name."""

    def draw(*arguments: str) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Path]]:
        out = tmp_path / "out"
        records = ["--texts", str(texts(tmp_path / "texts")), "--output", str(out)]
        assert main(["tradeoff", *records, *arguments]) == 0
        curves: dict[str, list[dict[str, Any]]] = {}
        for point in json.loads((out / "tradeoff.json").read_text())["points"]:
            curves.setdefault(point["curve"], []).append(point)
        return curves, {path.name: path for path in out.iterdir()}

    return draw


def test_points_are_paired_by_their_share_of_the_context(drawn: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves, files = drawn("--speed", str(speed(tmp_path / "speed")))
    assert set(curves) == {"quest", "window", "dense"}  # a floor has a context of its own
    first, second = curves["quest"]
    assert (first["share"], first["text_budget"], first["step_budget"]) == ("1/64", 64, 512)
    assert (second["share"], second["text_budget"], second["step_budget"]) == ("1/32", 128, 1024)
    assert first["kl"] == pytest.approx([0.2, 0.6])
    assert (first["step_ms"], second["step_ms"]) == pytest.approx((7.5, 7.8))
    # Tokens a second are by the mean step, which is a quarter of a millisecond longer.
    assert first["tokens_per_second"] == pytest.approx(1e3 * 8 / 7.75)
    (window,) = curves["window"]
    assert (window["step_budget"], window["step_ms"]) == (1024, pytest.approx(6.2))
    (dense,) = curves["dense"]
    assert (dense["share"], dense["kl"], dense["step_ms"]) == ("", [], pytest.approx(14.0))
    assert not any(point["is_estimated"] for points in curves.values() for point in points)

    table = files["tradeoff.md"].read_text()
    assert "| quest | measured | 1 | 1/32 | 128 | 1024 | 0.2000 [0.1000, 0.3000] | 7.80 |" in table
    assert "smollm2, 2 texts of 4096 tokens" in table
    assert "qwen3-8b, 8 × 32768; 1 × NVIDIA H200, sglang 0.5.17" in table
    assert "stimated" not in files["tradeoff.svg"].read_text() + table
    assert files["tradeoff.png"].stat().st_size > 10_000


def test_an_estimate_is_the_planners_and_named_so(drawn: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = "cache rank"
    curves, files = drawn(
        *("--speed", str(speed(tmp_path / "speed"))),
        *("--curve", name, CALIBRATED, "cache-rank"),
        *("--estimate", name, CALIBRATED, "cache-rank:kv_residency=hack"),
        *("--estimate", "tensor parallel", "dense", "tp2-fp8"),
        *("--estimate", "window", "window", "window"),
        *("--gpu", "H100"),
    )
    measured, estimated = curves[name]
    assert (measured["is_estimated"], estimated["is_estimated"]) == (False, True)
    assert measured["step_ms"] == pytest.approx(6.3)
    assert measured["kl"] == estimated["kl"] == pytest.approx([0.02, 0.06])
    planner, _ = make_planner(MODEL, {"sparse_budget": 1024, "kv_residency": "hack"}, gpu="H100")
    expected = planner.cache_rank(8, 32768)
    assert estimated["step_ms"] == pytest.approx(1e3 * expected.step)
    assert (estimated["gpus"], estimated["step_budget"]) == (2, 1024)
    assert estimated["tokens_per_second"] == pytest.approx(8 / expected.step)
    (parallel,) = curves["tensor parallel"]
    assert parallel["step_ms"] == pytest.approx(1e3 * planner.dense(8, 32768, 2, 1))
    (window,) = curves["window"]
    assert window["step_ms"] == pytest.approx(1e3 * expected.inference)
    svg = files["tradeoff.svg"].read_text()
    for label in ("cache rank (2 GPUs)", "cache rank (estimated, 2 GPUs)", "window (estimated)"):
        assert f"<!-- {label} -->" in svg
    assert "Estimated steps: qwen3-8b, 8 × 32768, H100" in files["tradeoff.md"].read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--curve x oracle quest", "x: no text was scored by oracle, only by quest, window"),
        ("--curve x window quest:page=2", "recorded at none: measure some share of both"),
        ("--curve x dense fp8", "x: no step of fp8 at 8x32768 is recorded"),
        ("--curve x quest floor", "floor: runs at a context of its own"),
        ("--curve x quest nothing", "no system 'nothing'"),
        ("--estimate x quest quest", "quest: no estimate; measure it: python -m scripts.profile_t"),
        ("--estimate x quest cache-rank:port=1", "no argument port of a cache rank"),
        ("--shape 4x32768", "no system is in both records"),
        ("--speed nowhere", "no record nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    arguments: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = ["--texts", str(texts(tmp_path / "texts")), "--output", str(tmp_path / "out")]
    records += ["--speed", str(speed(tmp_path / "speed"))]
    assert main(["tradeoff", *records, *arguments.split()]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
