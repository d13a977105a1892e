"""Long texts of several kinds that every installation of SGLang has: files of its dependencies.

    name, text = read_text("optics")
    name, text = read_text("notes/my-own-text.txt")

They are read where pip installed them, and nothing of them is copied here. A text is another one
when its package has another version, so results should keep `sha256_of` what was read. Each has
over 7,200 tokens of SmolLM2, and was written by people: its beginning is neither generated nor one
passage again and again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """A file of an installed package."""

    name: str
    kind: str
    package: str
    """The distribution that installs it, as pip calls it."""
    path: str
    """Below site-packages; `*` stands for a version."""

    def file(self) -> Path:
        """Where it is installed.

        Raises:
            ValueError: the package is not installed, or its version has no such file.
        """
        try:
            root = Path(str(metadata.distribution(self.package).locate_file("")))
        except metadata.PackageNotFoundError:
            raise ValueError(
                f"text {self.name!r} is a file of {self.package}, which is not installed: "
                "install it, or name another text or a file"
            ) from None
        files = sorted(root.glob(self.path))
        if not files:
            version = metadata.version(self.package)
            raise ValueError(
                f"text {self.name!r}: {self.package} {version} has no {self.path}: "
                "name another text or a file"
            )
        return files[0]


_ALL = (
    # Newton's treatise, with which a library tests its decompressor
    Text(
        "optics",
        "prose",
        "apache-tvm-ffi",
        "tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt",
    ),
    Text("definitions", "dictionary", "timm", "timm/data/_info/imagenet_synset_to_definition.txt"),
    Text(
        "cuda-licence",
        "licence",
        "nvidia-cuda-runtime",
        "nvidia_cuda_runtime-*.dist-info/licenses/License.txt",
    ),
    Text("regex-manual", "manual", "regex", "regex-*.dist-info/METADATA"),
    Text("progress-manual", "manual", "tqdm", "tqdm-*.dist-info/METADATA"),
    Text("image-models", "release notes", "timm", "timm-*.dist-info/METADATA"),
    Text("tensor-reference", "reference", "torch", "torch/_torch_docs.py"),
    Text("generation", "Python", "transformers", "transformers/generation/utils.py"),
    Text("distributions", "Python", "scipy", "scipy/stats/_distn_infrastructure.py"),
    Text("bindings", "C++", "torch", "torch/include/pybind11/pybind11.h"),
    Text(
        "attention-kernel",
        "CUDA",
        "torch",
        "torch/include/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h",
    ),
    Text("derivatives", "YAML", "torch", "torchgen/packaged/autograd/derivatives.yaml"),
    Text("graph-breaks", "JSON", "torch", "torch/_dynamo/graph_break_registry.json"),
)
TEXTS = {text.name: text for text in _ALL}
"""All of them, by name."""


def read_text(name_or_path: str | Path) -> tuple[str, str]:
    """The name and the whole of a text: one of `TEXTS`, or a file of the reader's own.

    Raises:
        ValueError: there is no such text or file, or it is empty or not in UTF-8.
    """
    name = str(name_or_path)
    if name in TEXTS:
        file = TEXTS[name].file()
    elif not (file := Path(name)).is_file():
        raise ValueError(f"no text {name!r}: a file, or one of {', '.join(TEXTS)}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text {name!r}: {file} is not in UTF-8: {error.reason}") from None
    if not text.strip():
        raise ValueError(f"text {name!r}: {file} is empty")
    return name, text


def sha256_of(text: str) -> str:
    """The SHA-256 of a text in UTF-8, as `sha256sum` gives it for a file with Unix line ends."""
    return hashlib.sha256(text.encode()).hexdigest()
