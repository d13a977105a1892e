"""A pair of servers is measured with several codes, and what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.profile_transfer import main, parse_options

ARGUMENTS = (
    "--model bundled --prompt 600 --answer 8 --rates 4 --requests 3 --systems dense "
    "--link-gbps 0.05"
).split()


@pytest.mark.thorough
def test_codes_are_measured_on_one_pair(tmp_path: Path) -> None:
    assert main([*ARGUMENTS, "--codes", "bf16", "hack", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["measurements"]
    raw, coded = found
    assert (raw["codes"], coded["codes"]) == ("bf16", "hack")
    assert raw["megabytes"] > 1.3 * coded["megabytes"] > 0
    for one in found:
        assert len(one["jct"]) == len(one["ttft"]) == 3
        assert all(jct > ttft > 0 for jct, ttft in zip(one["jct"], one["ttft"], strict=True))
        assert one["transfer"] >= one["megabytes"] / 1e3 * 8 / 0.05 * 0.8
    assert "| dense | 4.00 | hack |" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("--rates 0", "positive"),
        ("--answer 1", "at least 2"),
        ("--link-gbps 0", "positive"),
        ("--systems cache-rank", "no cache rank"),
        ("--model qwen3-8b --systems tp2", "one GPU"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_options([*ARGUMENTS, *wrong.split()])
