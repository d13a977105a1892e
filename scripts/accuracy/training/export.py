"""Writes models as Hugging Face directories that SGLang serves like any Qwen3 checkpoint."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM


def export(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path, dtype: torch.dtype
) -> None:
    """Write the directory, without its card; a reader of `output` finds whole files at any time."""
    output.mkdir(parents=True, exist_ok=True)
    exported = copy.deepcopy(model).to("cpu", dtype)
    exported.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with tempfile.TemporaryDirectory(prefix=".export-", dir=output.parent) as name:
        folder = Path(name)
        exported.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)  # is created readable by its owner alone
        # Readers older than transformers 5 know neither of its names for these two.
        _patch_json(folder / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])
        _patch_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        # SGLang knows greedy decoding by temperature 0, which save_pretrained refuses to write.
        _patch_json(folder / "generation_config.json", temperature=0.0)
        for path in folder.iterdir():
            os.replace(path, output / path.name)


def _patch_json(path: Path, **values: object) -> None:
    """Set top-level keys of a JSON file."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
