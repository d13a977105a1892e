"""Outcomes, what they are reduced to, and what is written of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from scripts.accuracy.flops import ModelSize, decode_token, scoring
from scripts.accuracy.outcomes import Cell, Outcome, Run
from scripts.accuracy.plots import curve_name
from scripts.accuracy.report import Report, markdown, summarize, write_report
from scripts.accuracy.settings import POLICY
from scripts.shared.lines import Lines
from scripts.shared.models import BUNDLED, model_config
from scripts.shared.systems import System

RUN = Run(["python -m scripts.evaluate"], {"platform": "here", "cpus": 2}, POLICY, "float32")
DIALS = {"facts": 128, "hops": 10}


def cell_of(system: str, **dials: int) -> Cell:
    return Cell(BUNDLED, system, "pointer-chase", {**DIALS, **dials})


def outcome(cell: Cell, seed: int, prefix: int, correct: int | None = None) -> Outcome:
    hops = cell.dials["hops"]
    return Outcome(
        cell,
        seed,
        correct_hops=prefix if correct is None else correct,
        correct_prefix_hops=prefix,
        hops=hops,
        exact=prefix == hops,
        prompt_tokens=259,
        output_tokens=40,
        sparse_steps=30 if cell.system.startswith("cache-rank") else None,
        late_steps=3,
        stale_steps=6,
        recall=(None, 0.5, 1.0)[seed % 3] if cell.system.startswith("cache-rank") else None,
    )


def outcomes_of(system: str, prefixes: list[int], **dials: int) -> list[Outcome]:
    cell = cell_of(system, **dials)
    return [outcome(cell, seed, prefix) for seed, prefix in enumerate(prefixes)]


def test_a_cell_in_numbers() -> None:
    dense = outcomes_of("dense", [10, 10, 10, 10])
    sparse = outcomes_of("cache-rank:sparse_budget=16", [10, 4, 10, 0])
    full, ours = summarize([*sparse, *dense], RUN)
    assert (full.exact.value, full.exact_difference) == (1.0, None)
    assert (ours.chains, ours.exact.value, ours.hop_accuracy.value) == (4, 0.5, 0.6)
    assert ours.exact_difference is not None
    assert ours.exact_difference.value == -0.5
    assert ours.exact_difference.low >= -1.0
    assert ours.correct_prefix.value == 6.0
    assert ours.survival == [0.75] * 4 + [0.5] * 6
    assert (ours.sparse_steps, ours.late_steps, ours.stale_steps) == (0.75, 0.1, 0.2)
    # The first and the last problem ended before a step of theirs was measured.
    assert (ours.recall, ours.attention_mass, full.recall) == (0.75, None, None)
    assert ours.bits == 32
    size = ModelSize.of_config(model_config(BUNDLED))
    # 4 sinks, 16 selected, 16 recent, the token itself; at the middle of the decode.
    assert ours.flops == decode_token(size, "cache-rank", 279, 37, dense_layers=1)
    assert full.flops == decode_token(size, "dense", 279, 0)
    assert ours.cache_rank_flops == scoring(size, 279) / size.layers


def test_differences_are_of_shared_problems() -> None:
    dense = outcomes_of("dense", [10, 10, 0])
    ours = outcomes_of("window", [0, 10])
    result = summarize([*dense, *ours], RUN)[1]
    assert result.exact_difference is not None
    assert result.exact_difference.value == -0.5
    # Other dials are other problems.
    elsewhere = outcomes_of("window", [0, 10], restatements=2)
    assert summarize([*dense, *elsewhere], RUN)[1].exact_difference is None


def test_a_cell_of_one_problem_has_no_interval() -> None:
    assert summarize(outcomes_of("dense", [10]), RUN) == []


@pytest.mark.parametrize(
    ("changes", "bits"),
    [
        ("kv_residency=bf16", 32),
        ("kv_residency=hack,kv_residency_options=bits=2+partition=64", 3.0625),
    ],
)
def test_bits_are_the_formats_own(changes: str, bits: float) -> None:
    (result,) = summarize(outcomes_of(f"cache-rank:{changes}", [1, 2]), RUN)
    assert result.bits == pytest.approx(bits)


def test_outcomes_are_kept_as_they_come(tmp_path: Path) -> None:
    file = Lines(tmp_path / "made" / "outcomes.jsonl", Outcome)
    assert file.read() == []
    written = outcomes_of("dense", [1, 2, 3])
    for one in written:
        file.append(one)
    assert file.read() == written


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    file = Lines(path, Outcome)
    first, second, third = outcomes_of("dense", [1, 2, 3])
    file.append(first)
    file.append(second)
    path.write_bytes(path.read_bytes()[:-7])
    assert file.read() == [first]
    file.drop_half_line()
    file.append(third)
    assert file.read() == [first, third]


def test_a_report_is_written_and_read(tmp_path: Path) -> None:
    outcomes = outcomes_of("dense", [10, 10, 10], restatements=3)
    for r in (1, 3):
        for k in (16, 64):
            label = f"cache-rank:sparse_budget={k}"
            outcomes += outcomes_of(label, [10, k // 16, 10], restatements=r)
    files = write_report(RUN, outcomes, tmp_path)
    written = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=Report)
    assert written.results == summarize(outcomes, RUN)
    text = (tmp_path / "results.md").read_text()
    assert "| cache-rank |  | 16 | 0.67 [" in text
    assert "restatements=3" in text
    assert "| cache-rank:sparse_budget=64 | 0.67 (0.800) | 0.67 (0.800) |" in text
    drawn = {file.name for file in files}
    assert {"restatements-pointer-chase-bundled.png", "budget-pointer-chase-bundled-2.svg"} <= drawn
    assert all(file.stat().st_size > 0 for file in files)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("dense", "dense"),
        ("quest:sparse_budget=16", "quest"),
        ("cache-rank:query_predictor=spade", "cache-rank: spade"),
        (
            "cache-rank:wire_dtype=int8,query_window=4",
            "cache-rank: wire_dtype int8, query_window 4",
        ),
    ],
)
def test_curves_are_named_for_readers(label: str, name: str) -> None:
    assert curve_name(System.parse(label), frozenset({"sparse_budget"})) == name


def test_failures_are_reported() -> None:
    run = Run(RUN.commands, RUN.machine, RUN.settings, RUN.dtype, failures={"quest": "no memory"})
    assert "quest failed: no memory" in markdown(run, [])
