"""Texts of installed packages, and files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from scripts.accuracy.texts import TEXTS, Text, find_text


@pytest.mark.parametrize("name", list(TEXTS))
def test_a_text_is_installed_and_long(name: str) -> None:
    text = TEXTS[name].read()
    assert len(text) > 30_000
    assert find_text(name).sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_there_are_texts_of_several_kinds() -> None:
    assert len(TEXTS) >= 8
    assert len({text.kind for text in TEXTS.values()}) >= 6


def test_a_file_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("Once.")
    text = find_text(str(path))
    assert (text.name, text.kind, text.read()) == ("story", "txt", "Once.")


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="or one of opticks"):
        find_text("nothing")
    with pytest.raises(ValueError, match="no-such-package is not installed"):
        Text("a", "b", "c", "no-such-package").read()
    with pytest.raises(ValueError, match=r"torch has no file no/such\.txt"):
        Text("a", "b", "no/such.txt", "torch").read()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="utf-8"):
        find_text(str(tmp_path / "binary")).read()
