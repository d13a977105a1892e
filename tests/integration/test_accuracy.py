"""The evaluation as its users run it, on a server that runs: dense, sparse, and both compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.report import read_report
from scripts import evaluate
from scripts.serving import Server

SHORT = "--dials facts=128,hops=30 --chains 4 --gpus --out".split()


def test_evaluates_a_running_server(bundled_server: Server, tmp_path: Path) -> None:
    command = [*SHORT, str(tmp_path), "--base-url", bundled_server.url]
    assert evaluate.main([*command, "--systems", "dense", "--budgets", "40"]) == 0
    ours = [*command, "--systems", "cache-rank", "--budgets", "40"]
    with pytest.raises(SystemExit, match="--resume"):
        evaluate.main(ours)
    assert evaluate.main([*ours, "--resume"]) == 0

    dense, sparse = read_report(tmp_path / "results.json").results
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
