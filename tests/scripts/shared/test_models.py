"""Models are found by name, and one that has to be fetched first says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.evaluate import parse_options
from scripts.shared.models import FETCHED, find_config, folder_of, model_config


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_config.cache_clear()
    return tmp_path / "sglang-cache-rank"


@pytest.mark.parametrize("model", FETCHED)
def test_a_model_is_found_when_it_is_fetched(cache: Path, model: str) -> None:
    for find in (folder_of, model_config):
        with pytest.raises(ValueError, match=f"{model} is not here yet.*{FETCHED[model]}$"):
            find(model)
    assert find_config(model) is None
    (cache / model).mkdir(parents=True)
    assert folder_of(model) == cache / model


def test_evaluate_says_how_to_fetch_a_model(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--model", "smollm2", "--out", str(tmp_path)])
    assert "fetch it: python -m scripts.fetch_model smollm2" in capsys.readouterr().err


def test_an_unknown_model_lists_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"no model 'smollm3': a folder, bundled, .*qwen3-8b.*smollm2"
    ):
        model_config("smollm3")
