"""A real language model, SmolLM2-135M-Instruct, decodes texts by force on the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.score_text import main

# Three servers take minutes where other tests take the cores as well.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.language_model,
    pytest.mark.xdist_group("language-model"),
    pytest.mark.timeout(900),
]

SETTINGS = "--context 400 --tokens 48 --warm-up 24 --text opticks --gpus"


def test_every_token_selected_equals_dense_and_few_do_not(
    language_model: Path, tmp_path: Path
) -> None:
    systems = ["cache-rank:sparse_budget=1024", "cache-rank:sparse_budget=32"]
    arguments = ["--model-path", str(language_model), "--out", str(tmp_path / "out")]
    assert main([*arguments, *SETTINGS.split(), "--systems", *systems]) == 0
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    cells = {(cell["text"], cell["budget"]): cell for cell in report["cells"]}
    assert len(cells) == 2
    every, few = cells["opticks", 1024], cells["opticks", 32]
    assert every["largest_difference"] < 1e-4
    assert 0 <= every["kl"] < 1e-6
    assert every["top1_agreement"] == 1
    assert 0.01 < few["kl"] < 3
    assert few["ratio_p5"] < every["ratio_p5"]
    for cell in (every, few):
        # 17 exchanged steps fill the query window; slots fill in one.
        assert cell["sparse_from"] <= 24
        assert len(cell["kl_after_transition"]) == 72 - cell["sparse_from"]
        assert cell["stale_steps"] == 0
    assert not (tmp_path / "out" / "logits").exists()
