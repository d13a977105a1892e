"""A real language model, SmolLM2-135M-Instruct, decodes texts by force on the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.score_text import main

# Two servers take minutes where other tests take the cores as well.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.language_model,
    pytest.mark.xdist_group("language-model"),
    pytest.mark.timeout(900),
]

SETTINGS = (
    "--context 400 --tokens 48 --warm-up 24 --text opticks --gpus "
    "--systems cache-rank:sparse_budget=1024"
)


def test_every_token_selected_equals_dense(language_model: Path, tmp_path: Path) -> None:
    arguments = ["--model-path", str(language_model), "--out", str(tmp_path / "out")]
    assert main([*arguments, *SETTINGS.split()]) == 0
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    (cell,) = report["cells"]
    assert (cell["text"], cell["budget"]) == ("opticks", 1024)
    assert cell["largest_difference"] < 1e-4
    assert 0 <= cell["kl"] < 1e-6
    assert cell["top1_agreement"] == 1
    # 17 exchanged steps fill the query window; slots fill in one.
    assert cell["sparse_from"] <= 24
    assert cell["stale_steps"] == 0
    assert not (tmp_path / "out" / "logits").exists()
