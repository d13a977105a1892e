"""The texts of packages are there, differ, and are read whole; what is not there is said."""

from __future__ import annotations

import hashlib
import zlib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.accuracy.texts import TEXTS, Text, read_text, sha256_of


def test_there_are_many_kinds() -> None:
    assert len(TEXTS) >= 10
    assert len({text.kind for text in TEXTS.values()}) >= 8
    assert all(name == text.name for name, text in TEXTS.items())
    assert len({text.file() for text in TEXTS.values()}) == len(TEXTS)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_its_file(name: str) -> None:
    read_name, text = read_text(name)
    assert read_name == name
    content = TEXTS[name].file().read_bytes().replace(b"\r\n", b"\n")
    assert sha256_of(text) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_does_not_repeat_itself(name: str) -> None:
    """Plain text compresses to a third or a quarter; a passage again and again, to much less."""
    beginning = read_text(name)[1][:32768].encode()
    assert len(zlib.compress(beginning, 9)) > len(beginning) / 6


def test_packages_come_with_sglang() -> None:
    """Every package is one that SGLang requires, or that one of those requires, and so on."""
    required, new = set[str](), {"sglang"}
    while new:
        required |= new
        lines = [line for name in new for line in requirements(name)]
        new = {canonicalize_name(Requirement(line).name) for line in lines} - required
    assert {canonicalize_name(text.package) for text in TEXTS.values()} <= required


def requirements(package: str) -> list[str]:
    """What an installed package requires here; nothing of one that this machine does not need."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    # The CUDA toolkit names its libraries in extras.
    extras = ["cudart"] if package == "cuda-toolkit" else [""]
    return [
        line
        for line in lines
        if (marker := Requirement(line).marker) is None
        or any(marker.evaluate({"extra": extra}) for extra in extras)
    ]


def test_own_file_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    assert read_text(file) == (str(file), "Grüße\n")
    assert sha256_of("Grüße\n") == hashlib.sha256(file.read_bytes()).hexdigest()


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"no text 'optiks': a file, or one of optics, .*graph-breaks"
    ):
        read_text("optiks")


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"notes.txt is not in UTF-8"):
        read_text(file)
    file.write_bytes(b" \n")
    with pytest.raises(ValueError, match=r"notes.txt is empty"):
        read_text(file)


def test_missing_file_names_its_package() -> None:
    with pytest.raises(ValueError, match=r"torch 2\S* has no torch/gone.md"):
        Text("gone", "prose", "torch", "torch/gone.md").file()
    with pytest.raises(ValueError, match=r"file of no-such-package, which is not installed"):
        Text("gone", "prose", "no-such-package", "gone.md").file()
