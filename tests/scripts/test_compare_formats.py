"""compare_formats on tiny sequences: its numbers, data and files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from cache_rank.residency import FORMATS
from scripts.compare_formats import Comparison, Measurement, main

TINY = {"tokens": 600, "layers": 1, "query_heads": 4, "head_dim": 32, "steps": 2}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """The comparison of all formats, as the program writes it."""
    out = tmp_path_factory.mktemp("formats")
    assert main(["--budget", "32", "--out", str(out)], **TINY) == 0
    return msgspec.json.decode((out / "formats.json").read_bytes(), type=Comparison), out


def line(comparison: Comparison, name: str, options: str = "") -> Measurement:
    (found,) = (m for m in comparison.measurements if (m.format, m.options) == (name, options))
    return found


def test_tokens_as_they_came_have_no_error(comparison: tuple[Comparison, Path]) -> None:
    exact = line(comparison[0], "bf16")
    assert (exact.bytes, exact.bits) == (2 * 32 * 2, 16)
    quality = exact.quality
    assert quality.key_error == quality.value_error == quality.output_error == 0
    assert quality.score_error == pytest.approx(0, abs=1e-12)
    assert quality.recall == 1


def test_every_format_has_a_line_and_is_worth_what_it_holds(
    comparison: tuple[Comparison, Path],
) -> None:
    assert {m.format for m in comparison[0].measurements} == set(FORMATS)
    for m in comparison[0].measurements:
        assert 0 < m.bits <= 20
        assert 0 <= m.quality.recall <= 1
        assert 0 <= m.quality.attention_mass <= 1
    for name, all_bits, first_bits in (("quantspec", 8, 4), ("lynx", "full", "anchor")):
        fine, coarse = (
            line(comparison[0], name, f"reading={bits}").quality for bits in (all_bits, first_bits)
        )
        for error in ("key_error", "value_error", "output_error", "score_error"):
            assert 0 < getattr(fine, error) < getattr(coarse, error) / 10
    two, four = (
        line(comparison[0], "hack", f"bits={bits},partition=64").quality for bits in (2, 4)
    )
    assert two.key_error is not None
    assert four.key_error is not None
    assert four.key_error < two.key_error / 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recording {folder}", "holds no recorded decode step"),
        ("--recording {folder}/broken", "not an event of a recording"),
        ("--recording {folder}/other", "not an event of a recording"),
        ("--budget 5000", "smaller budget"),
    ],
)
def test_bad_data_is_refused(arguments: str, message: str, tmp_path: Path) -> None:
    for name in ("broken", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "00000001.pt").write_bytes(b"nothing")
    torch.save(torch.zeros(3), tmp_path / "other" / "00000001.pt")
    words = arguments.format(folder=tmp_path).split()
    with pytest.raises(ValueError, match=message):
        main([*words, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
