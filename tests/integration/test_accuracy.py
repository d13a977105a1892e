"""A user evaluates a server that runs, dense and sparse, and compares the two."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from scripts import evaluate
from scripts.evaluate import Report
from scripts.shared.serving import Server
from scripts.shared.systems import CACHE_RANK, INLINE

pytestmark = pytest.mark.xdist_group("bundled server")


@pytest.mark.parametrize(
    ("fixture", "label"),
    [
        ("bundled_server", f"{CACHE_RANK}:sparse_budget=40"),
        ("bundled_inline_server", f"{INLINE}:sparse_budget=null"),
    ],
)
def test_evaluates_a_running_server(
    fixture: str, label: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: Server = request.getfixturevalue(fixture)
    command = ["--out", str(tmp_path), "--base-url", server.url, "--gpus"]
    command += f"--chains 4 --hops 30 --systems dense {label} --budgets 1".split()
    assert evaluate.main(command) == 0

    report = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=Report)
    dense, sparse = report.results
    assert (dense.system, sparse.system) == ("dense", label)
    assert dense.exact.value == sparse.exact.value == 1.0
    assert dense.sparse_steps == 0
    assert dense.exact_difference is None
    assert sparse.sparse_steps is not None
    assert sparse.sparse_steps > 0.5
    assert sparse.exact_difference is not None
    assert sparse.exact_difference.value == 0.0
    table = (tmp_path / "results.md").read_text()
    assert f"| {label} | 1.00 | 0.00 | 1.000 |" in table
