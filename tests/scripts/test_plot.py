"""Figures of what a server measured, from a state as `/server_info` shows it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.protocol import Measurement
from scripts.accuracy.recall import SETTINGS, read_state
from scripts.plot import main
from sglang_ext.recall import RecallStatistics

pytest.importorskip("matplotlib")


def server_info(
    layers: int, kv_heads: int, measured: bool = True, has_true_keys: bool = True
) -> dict[str, Any]:
    """The `/server_info` of a server whose layers recall all the better the deeper they are."""
    model = ModelShape(layers, 2 * kv_heads, kv_heads, 8, "float32", 1.0)
    config = CacheRankConfig(model, query_window=8)
    statistics = RecallStatistics(config, first_layer=1, has_true_keys=has_true_keys)

    def heads(scale: float, count: int = kv_heads) -> list[list[float]]:
        return [
            [scale * (layer + 1) / layers - head / 100 for head in range(count)]
            for layer in range(layers)
        ]

    cosines = heads(0.99, 2 * kv_heads)
    overlaps = [heads(1 / distance) for distance in (1, 2, 4, 8)]
    if measured:
        held = Measurement(1, 30, 0, heads(1), heads(0.9), cosines, heads(0.8), overlaps)
        true_shares = torch.tensor([heads(0.7), heads(0.6)]) if has_true_keys else None
        statistics.add(held, true_shares)
    return {
        **dict.fromkeys(SETTINGS, 0),
        "model_path": "/models/Some-8B",
        "internal_states": [{"cache_rank": {"recall_by_head": statistics.by_head()}}],
    }


def saved(folder: Path, info: dict[str, Any]) -> Path:
    path = folder / "server_info.json"
    path.write_text(json.dumps(info))
    return path


@pytest.mark.parametrize(
    ("layers", "kv_heads"), [(1, 2), pytest.param(35, 8, marks=pytest.mark.thorough)]
)
def test_it_draws_maps_and_curves_and_keeps_what_they_are_drawn_from(
    tmp_path: Path, layers: int, kv_heads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    info = server_info(layers, kv_heads)
    out = tmp_path / "out"
    assert main(["recall", "--file", str(saved(tmp_path, info)), "--output", str(out)]) == 0
    names = {
        "recall.json",
        *(f"recall-{n}.{s}" for n in ("heads", "overlap") for s in ("png", "svg")),
    }
    assert {path.name for path in out.iterdir()} == names
    assert set(capsys.readouterr().out.split()) == {str(out / name) for name in names}
    for path in out.glob("*.png"):
        head = path.read_bytes()[:24]
        width, height = struct.unpack(">II", head[16:])
        assert head.startswith(b"\x89PNG")
        assert min(width, height) > 300
    for path in out.glob("*.svg"):
        text = path.read_text()
        assert "Some-8B" in text
        assert "measurements of each layer" in text

    state = json.loads((out / "recall.json").read_text())
    assert state["measured"] == info["internal_states"][0]["cache_rank"]["recall_by_head"]
    assert state["settings"].keys() == set(SETTINGS)
    # What was written is as good as the server, and gives the same figures.
    again = tmp_path / "again"
    assert main(["recall", "--file", str(out / "recall.json"), "--output", str(again)]) == 0
    for path in out.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("has_true_keys", [True, False])
def test_recall_by_held_keys_is_drawn_under_its_name_where_there_is_no_other(
    tmp_path: Path, has_true_keys: bool
) -> None:
    info = server_info(1, 2, has_true_keys=has_true_keys)
    out = tmp_path / "out"
    assert main(["recall", "--file", str(saved(tmp_path, info)), "--output", str(out)]) == 0
    text = (out / "recall-heads.svg").read_text()
    for name in ("recall", "attention mass"):
        assert (f"<!-- {name}, mean" in text) == has_true_keys
        assert (f"<!-- {name} by held keys, mean" in text) == (not has_true_keys)


def test_a_server_that_measured_nothing_is_told_what_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, server_info(2, 2, measured=False))
    assert main(["recall", "--file", str(path), "--output", str(tmp_path / "out")]) == 2
    assert "--recall-interval" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_server_without_a_cache_rank_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, {"internal_states": [{}]})
    assert main(["recall", "--file", str(path)]) == 2
    assert "no cache rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("--file /nowhere/info.json", "No such file or directory: '/nowhere/info.json'"),
        ("--base-url http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_read_is_said(
    source: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recall", *source.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert why in line


def test_a_wrong_shape_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tradeoff", "--texts", "texts", "--shape", "8"])
    assert "--shape: '8' is not a shape" in capsys.readouterr().err


def test_settings_are_those_of_the_server(tmp_path: Path) -> None:
    info = {**server_info(1, 1), "sparse_budget": 40, "unrelated": 1}
    state = read_state(None, saved(tmp_path, info))
    assert state["settings"]["sparse_budget"] == 40
    assert "unrelated" not in state["settings"]
