"""A user evaluates a server that runs, dense and sparse, and compares the two."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from scripts import evaluate
from scripts.accuracy.outcomes import Result
from scripts.accuracy.report import Report
from scripts.shared.serving import Server, serve

pytestmark = pytest.mark.xdist_group("bundled server")

CHAINS = "--chains 4 --gpus --out".split()


def read_results(folder: Path) -> list[Result]:
    return msgspec.json.decode((folder / "results.json").read_bytes(), type=Report).results


def test_evaluates_a_running_server(bundled_server: Server, tmp_path: Path) -> None:
    command = [*CHAINS, str(tmp_path), "--base-url", bundled_server.url]
    command += ["--dials", "facts=128,hops=30"]
    assert evaluate.main([*command, "--systems", "dense", "--budgets", "40"]) == 0
    ours = [*command, "--systems", "cache-rank", "--budgets", "40"]
    with pytest.raises(SystemExit, match="--resume"):
        evaluate.main(ours)
    assert evaluate.main([*ours, "--resume"]) == 0

    dense, sparse = read_results(tmp_path)
    assert dense.exact.value == sparse.exact.value == 1.0
    assert dense.sparse_steps == 0
    assert sparse.sparse_steps is not None
    assert sparse.sparse_steps > 0.5
    assert sparse.exact_difference is not None
    assert sparse.exact_difference.value == 0.0

    before = (tmp_path / "outcomes.jsonl").read_bytes()
    assert evaluate.main([*ours, "--resume"]) == 0
    assert (tmp_path / "outcomes.jsonl").read_bytes() == before
    assert (tmp_path / "results.md").exists()


def test_a_problem_may_have_no_prompt(bundled_server: Server, tmp_path: Path) -> None:
    command = [*CHAINS, str(tmp_path), "--base-url", bundled_server.url, "--systems", "dense"]
    task = "--budgets 40 --task self-written --dials hops=2,keys=8".split()
    assert evaluate.main([*command, *task]) == 0
    (result,) = read_results(tmp_path)
    # This model has not learned to write tables; what it writes instead is graded.
    assert result.output_tokens.value == 2 * 8 + 1 + 2 * 4
    assert result.exact.value == 0.0


def test_a_small_budget_selects_well_with_the_flags_that_follow_it(tmp_path: Path) -> None:
    small = "--sparse-threshold 264 --sparse-budget 40 --recent-tokens 16 --recall-interval 4"
    with serve([*small.split(), "--enable-metrics"]) as server:
        command = [*CHAINS, str(tmp_path), "--base-url", server.url, "--budgets", "40"]
        dials = ["--systems", "cache-rank", "--dials", "facts=128,hops=80"]
        assert evaluate.main([*command, *dials]) == 0
    (result,) = read_results(tmp_path)
    assert result.exact.value == 1.0
    assert result.sparse_steps is not None
    assert result.sparse_steps > 0.9
    assert result.recall is not None
    assert result.recall > 0.45
