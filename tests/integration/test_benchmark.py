"""A user benchmarks one server, dense and sparse, and compares the runs.

The questions are three pointer chases, which the bundled model can walk. It puts no answer in a
box: the prompt file tells the harness to grade the last value of the walk, which is right only if
every hop before it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import benchmark
from scripts.accuracy.runs import EvaluatedServer, read_run
from scripts.shared.serving import Server

pytestmark = pytest.mark.xdist_group("bundled server")

DATA = Path(__file__).parents[1] / "data"
WALK_TOKENS = 319  # of 80 hops

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def ask(bundled_server: Server) -> Command:
    """Run the benchmark on the server."""

    def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scripts.benchmark", "run", "custom"]
        command += ["--base-url", f"{bundled_server.url}/v1", "--out", str(out), "--no-thinking"]
        command += ["--from-dataset", str(DATA / "pointer_chase.jsonl")]
        command += ["--prompt", str(DATA / "pointer_chase.yaml"), *options]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture(scope="module")
def systems(ask: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder holds a dense and a sparse run, each of which asks every question twice."""
    out = tmp_path_factory.mktemp("systems")
    for system, options in (("dense", ["--dense"]), ("cache-rank", [])):
        twice = ["--n-repeats", "2", "--max-tokens", str(WALK_TOKENS), *options]
        finished = ask(out / system, *twice)
        assert finished.returncode == 0, finished.stderr
    return out


@pytest.mark.parametrize("system", ["dense", "cache-rank"])
def test_every_question_is_answered_and_graded(systems: Path, system: str) -> None:
    (results,) = (systems / system / "custom").glob("sgl_eval_*")
    metrics: dict[str, Any] = json.loads((results / "metrics.json").read_text())
    assert (metrics["num_examples"], metrics["n_repeats"]) == (3, 2)
    assert metrics["aggregate"]["error_rate"] == 0
    assert metrics["aggregate"]["score"] == 1
    assert "partial" not in metrics
    assert metrics["gen"]["chat_template_kwargs"]["enable_thinking"] is False
    files = sorted(results.glob("output-rs*.jsonl"))
    assert [len(file.read_text().splitlines()) for file in files] == [3, 3]


def test_a_run_records_what_was_asked_of_which_server(systems: Path) -> None:
    dense, sparse = (read_run(systems / system / "custom") for system in ("dense", "cache-rank"))
    for run in (dense, sparse):
        assert run.record.server["sparse_budget"] == 40
        assert run.record.warnings == []
        assert {answer.question for answer in run.answers} == {"chain-0", "chain-1", "chain-2"}
        assert {answer.tokens for answer in run.answers} == {WALK_TOKENS}
        assert all(answer.is_truncated for answer in run.answers)  # a walk has no end of its own
    assert dense.record.counters["steps"] == 0
    assert dense.record.dense_requests == {"asked": 6}
    # In a step all requests are exchanged together, and not before the threshold.
    assert WALK_TOKENS / 2 < sparse.record.counters["steps"] < 6 * WALK_TOKENS
    assert sparse.record.counters["tokens_shipped"] > 0


def test_the_two_are_compared(
    systems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(systems / "dense"), str(systems / "cache-rank")]
    assert benchmark.main(["compare", *folders, "--out", str(tmp_path)]) == 0
    assert "| custom | 3 × 2 | 100.0 | 100.0 | +0.0 | 0 / 0 |" in capsys.readouterr().out
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert report["names"] == ["dense", "cache-rank"]
    (comparison,) = report["comparisons"]
    assert (comparison["questions"], comparison["repeats"]) == (3, 2)
    assert comparison["accuracy_difference"] == [0, 0, 0]
    assert comparison["tokens_ratio"] == [1, 1, 1]


def test_requests_at_a_time_are_those_that_the_cache_rank_holds(bundled_server: Server) -> None:
    server = EvaluatedServer(bundled_server.url)
    assert server.most_sparse_requests(WALK_TOKENS) == server.info["max_sparse_requests"] == 64
    assert server.capacity_tokens > 32 * 2049
    server.capacity_tokens = 3 * 2049 - 1
    assert server.most_sparse_requests(10_000) == 2  # a request has at most 2048 tokens
