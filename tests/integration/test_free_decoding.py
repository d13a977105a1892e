"""A real language model, SmolLM2-135M-Instruct, writes by itself on the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.decode_text import main

pytestmark = [
    pytest.mark.language_model,
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("language-model"),
]

SETTINGS = "--tasks question needle --lengths 400 --problems 2 --max-tokens 40 --gpus"


def test_every_token_selected_writes_what_dense_decoding_writes(
    language_model: Path, tmp_path: Path
) -> None:
    arguments = ["--model-path", str(language_model), "--out", str(tmp_path)]
    systems = ["--systems", "cache-rank:sparse_budget=512"]
    assert main([*arguments, *SETTINGS.split(), *systems]) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    (questions,) = report["questions"]
    assert questions["same"] == [None, None]
    assert questions["lengths"] == questions["dense_lengths"]
    answers = {(a["task"], a["seed"], a["system"]): a for a in report["answers"]}
    assert len(answers) == 8
    for (task, seed, system), answer in answers.items():
        assert answer["tokens"] == answers[task, seed, "dense"]["tokens"]
        if task == "needle":
            assert answer["exact"]
            assert answer["ended"]
        if system == "cache-rank":
            # 17 exchanged steps fill the query window; slots fill in one.
            assert 1 < answer["sparse_from"] <= 20
            assert answer["stale_steps"] == 0
    lines = (tmp_path / "answers.jsonl").read_bytes()
    assert main([*arguments, *SETTINGS.split(), *systems, "--resume"]) == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == lines
