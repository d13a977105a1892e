"""Texts that a language model reads: files of installed packages, read where they are installed.

They are files of what SGLang requires, most of them of versions that it pins. Nothing is copied;
what was read is named by its hash. All were written by people, and their beginnings are neither
generated nor one passage again and again.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from importlib import metadata
from pathlib import Path

import msgspec


class Text(msgspec.Struct, frozen=True):
    """A text.

    Attributes:
        path: below site-packages, where `*` stands for a version; without a package, a file.
        package: the distribution that has installed it, as pip calls it, or empty.
    """

    name: str
    path: str
    package: str = ""

    def read(self) -> str:
        """The whole text.

        Raises:
            ValueError: there is no such file, or it is empty or not in UTF-8.
        """
        path = self._locate()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"text {self.name}: cannot read {path}: {error}") from None
        if not text.strip():
            raise ValueError(f"text {self.name}: {path} is empty")
        return text

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.read().encode()).hexdigest()

    def _locate(self) -> Path:
        if not self.package:
            return Path(self.path)
        try:
            distribution = metadata.distribution(self.package)
        except metadata.PackageNotFoundError:
            raise ValueError(
                f"text {self.name}: {self.package} is not installed; install it, or name a file"
            ) from None
        files = sorted(Path(str(distribution.locate_file(""))).glob(self.path))
        if not files:
            raise ValueError(
                f"text {self.name}: {self.package} {distribution.version} has no {self.path}; "
                "name another text, or a file"
            )
        return files[0]


LONGEST_TOKEN = 16
"""A token of a text has fewer characters than this, but for few."""

_OPTICKS = "tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
_DEFINITIONS = "timm/data/_info/imagenet_synset_to_definition.txt"
_LICENCE = "nvidia_cublas-*.dist-info/licenses/License.txt"
_TRANSFORMER = "torch/nn/modules/transformer.py"
_KERNEL = "torch/include/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h"

TEXTS = {
    text.name: text
    for text in (
        Text("opticks", _OPTICKS, "apache-tvm-ffi"),
        Text("definitions", _DEFINITIONS, "timm"),
        Text("image-models", "timm-*.dist-info/METADATA", "timm"),
        Text("regex", "regex-*.dist-info/METADATA", "regex"),
        Text("cuda-licence", _LICENCE, "nvidia-cublas"),
        Text("transformer", _TRANSFORMER, "torch"),
        Text("distributions", "scipy/stats/_distn_infrastructure.py", "scipy"),
        Text("special-functions", "torch/include/ATen/native/Math.h", "torch"),
        Text("tensors", "torch/_torch_docs.py", "torch"),
        Text("attention-kernel", _KERNEL, "torch"),
        Text("derivatives", "torchgen/packaged/autograd/derivatives.yaml", "torch"),
        Text("graph-breaks", "torch/_dynamo/graph_break_registry.json", "torch"),
    )
}
"""Each has 12,000 tokens of SmolLM2 or more."""

CALIBRATION_TEXTS = {
    text.name: text
    for text in (
        *(TEXTS[name] for name in ("tensors", "attention-kernel", "derivatives", "graph-breaks")),
        Text("python", pydoc_data.topics.__file__),
        Text("changes", "pydantic-*.dist-info/METADATA", "pydantic"),
        Text("licences", "pyarrow-*.dist-info/licenses/LICENSE.txt", "pyarrow"),
        Text("progress", "tqdm-*.dist-info/METADATA", "tqdm"),
        Text("functions", "torch/nn/functional.py", "torch"),
        Text("tables", "pandas/core/frame.py", "pandas"),
    )
}
"""Texts that forecasts are fitted to by default; those that are scored by default are others."""


def find_text(name: str) -> Text:
    """A text of TEXTS by its name, or a file by its path.

    Raises:
        ValueError: there is neither; names the texts that there are.
    """
    known = {**TEXTS, **CALIBRATION_TEXTS}
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise ValueError(f"no text {name!r}: a file, or one of {', '.join(TEXTS)}")
    return Text(Path(name).stem, name)
