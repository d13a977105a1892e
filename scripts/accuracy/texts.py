"""Texts that a language model reads: files of installed packages, read where they are installed.

They are files of what SGLang requires, most of them of versions that it pins. Nothing is copied;
what was read is named by its hash.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import msgspec


class Text(msgspec.Struct, frozen=True):
    """A text.

    Attributes:
        name: names it in reports.
        kind: what sort of text it is.
        path: file, which `package` has installed; without a package a path of this machine.
        package: distribution, or empty.
    """

    name: str
    kind: str
    path: str
    package: str = ""

    def read(self) -> str:
        """The whole text.

        Raises:
            ValueError: there is no such file, or it is no text.
        """
        try:
            return self._locate().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"text {self.name}: {error}") from None

    @property
    def sha256(self) -> str:
        """The hash of the text in UTF-8."""
        return hashlib.sha256(self.read().encode()).hexdigest()

    def _locate(self) -> Path:
        if not self.package:
            return Path(self.path)
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(f"text {self.name}: {self.package} is not installed") from None
        for file in files:
            if str(file).endswith(self.path):
                return Path(str(file.locate()))
        raise ValueError(f"text {self.name}: {self.package} has no file {self.path}")


_OPTICKS = "tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
_DEFINITIONS = "timm/data/_info/imagenet_synset_to_definition.txt"

TEXTS = {
    text.name: text
    for text in (
        Text("opticks", "prose of 1704", _OPTICKS, "apache-tvm-ffi"),
        Text("definitions", "dictionary", _DEFINITIONS, "timm"),
        Text("image-models", "release notes", ".dist-info/METADATA", "timm"),
        Text("regex", "documentation", ".dist-info/METADATA", "regex"),
        Text("cuda-licence", "contract", "licenses/License.txt", "nvidia-cublas"),
        Text(
            "transformer", "Python, half of it documentation", "nn/modules/transformer.py", "torch"
        ),
        Text("distributions", "Python", "stats/_distn_infrastructure.py", "scipy"),
        Text("special-functions", "C++", "include/ATen/native/Math.h", "torch"),
    )
}
"""Each has 12,000 tokens of SmolLM2 or more."""


def find_text(name: str) -> Text:
    """A text of TEXTS by its name, or a file by its path.

    Raises:
        ValueError: there is neither; names the texts that there are.
    """
    if name in TEXTS:
        return TEXTS[name]
    if not Path(name).is_file():
        raise ValueError(f"no text {name!r}: a file, or one of {', '.join(TEXTS)}")
    return Text(Path(name).stem, Path(name).suffix.lstrip(".") or "file", name)
