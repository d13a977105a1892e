"""A plan is printed from a model's configuration, before anything is started."""

from __future__ import annotations

import pytest

from scripts.shared.models import MODEL_SHAPES
from sglang_ext.plan import main, parse_options, plan

MODEL = ("--model-path", str(MODEL_SHAPES / "qwen3-8b"))


def planned(*arguments: str) -> list[str]:
    return plan(parse_options([*MODEL, *arguments])).splitlines()


def cells(batch: int, context: int, *arguments: str) -> dict[str, str]:
    """The cells of one line, by the titles of their columns."""
    shape = ("--batches", str(batch), "--contexts", str(context))
    titles, _, line = planned(*shape, *arguments)[:3]
    titles, line = ([part.strip() for part in row.strip("|").split("|")] for row in (titles, line))
    return {title.removesuffix(", ms"): cell for title, cell in zip(titles, line, strict=True)}


def test_a_plan_has_a_row_for_each_batch_and_context() -> None:
    text = planned("--contexts", "8192", "32768", "--batches", "1", "24")
    rows = [line.split(" | ") for line in text if " × " in line][1:]
    assert [row[0] for row in rows] == [
        *("| 1 × 8,192", "| 24 × 8,192"),
        *("| 1 × 32,768", "| 24 × 32,768"),
    ]
    assert [row[1] for row in rows] == ["dense", "inline", "inline", "inline TP"]
    assert [row[-1].strip(" |") for row in rows] == ["yes", "yes", "yes", "no"]


def test_a_plan_says_what_stays_dense_and_what_does_not_fit() -> None:
    too_many = cells(128, 32768)
    assert too_many.pop("batch × context") == "128 × 32,768"
    assert {*too_many.values()} == {"–", "does not fit"}
    many = cells(32, 32768)
    assert (many["take"], many["dense"], many["inline"]) == ("inline TP", "–", "–")
    assert float(many["inline TP"]) < float(many["cache rank"]) < float(many["dense TP"])
    assert many["hidden"] == "no"
    small = cells(16, 32768, "--cache-rank-mem-fraction", "0.1")
    assert (small["cache rank"], small["hidden"]) == ("–", "does not fit")
    short = cells(4, 1023)
    assert (short["inline"], short["inline TP"], short["cache rank"]) == ("–", "–", "–")
    assert short["hidden"] == "stays dense"
    longer = cells(4, 4095)
    assert 0 < float(longer["inline"]) <= float(longer["dense"])
    assert float(longer["cache rank"]) < float(longer["dense"])
    assert cells(4, 4095, "--sparse-threshold", "4096")["hidden"] == "stays dense"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--sparse-budget 0", "sparse_budget"),
        ('--kv-residency hack --cache-rank-config {"kv_residency_options":"bits=3"}', "bits"),
        ("--kv-residency mosaickv", "kv_residency mosaickv is not estimated"),
    ],
)
def test_what_cannot_be_planned_is_said(
    arguments: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, *arguments.split()]) == 2
    assert why in capsys.readouterr().err
