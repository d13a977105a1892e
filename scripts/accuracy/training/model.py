"""The models that are trained: Qwen3 of small sizes, fresh or grown from a trained one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Sizes:
    """Fields of `Qwen3Config`."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


def make_model(
    sizes: Sizes, rope_theta: float, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Qwen3ForCausalLM:
    """A model of random float32 weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **asdict(sizes),
    )
    return Qwen3ForCausalLM(config)


def load_model(
    folder: Path, sizes: Sizes, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Qwen3ForCausalLM:
    """A trained model as float32, with random embeddings for the words that it does not know.

    Raises:
        ValueError: it has other sizes, or its words are not the first of the tokenizer.
    """
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {name: getattr(model.config, name) for name in asdict(sizes)}
    if found != asdict(sizes):
        raise ValueError(f"{folder} has sizes {found}, not {asdict(sizes)}")
    known = AutoTokenizer.from_pretrained(folder).get_vocab()
    if not known.items() <= tokenizer.get_vocab().items():
        raise ValueError(f"{folder} knows words that the recipe does not, or by other ids")
    torch.manual_seed(seed)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model
