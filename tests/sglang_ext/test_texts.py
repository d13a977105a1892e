"""Texts of installed packages, and files."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_ext.calibration.texts import TEXTS, Text, find_text


@pytest.mark.parametrize("name", list(TEXTS))
def test_a_text_is_installed_and_does_not_repeat_itself(name: str) -> None:
    """The start of a text compresses to some third; one passage again and again, to far less."""
    text = find_text(name).read()
    start = text[:32_768].encode()
    assert len(zlib.compress(start, 9)) > len(start) / 6
    assert find_text(name).sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.language_model
def test_every_text_fills_the_context(language_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    for name, text in TEXTS.items():
        # As many characters as 12,000 tokens may have; some texts have half a million tokens.
        assert len(tokenizer(text.read()[:100_000])["input_ids"]) >= 12_000, name


def test_a_file_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("Once.")
    text = find_text(str(path))
    assert (text.name, text.read()) == ("story", "Once.")


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="or one of opticks"):
        find_text("nothing")
    with pytest.raises(ValueError, match="no-such-package is not installed"):
        Text("a", "c", "no-such-package").read()
    with pytest.raises(ValueError, match=r"torch 2\S+ has no no/such\.txt"):
        Text("a", "no/such.txt", "torch").read()
