"""The models that are trained: Qwen3 of small sizes with a tokenizer of whole words.

They are made fresh or grown from a trained one, and written as Hugging Face directories that SGLang
serves like any Qwen3 checkpoint.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BOS, EOS, UNK = SPECIAL_TOKENS = ("<bos>", "<eos>", "<unk>")
# Chat completions encode the rendered template without special tokens, so that it has to emit BOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['content'] }}{{ '' if loop.last else ' ' }}{% endfor %}"
)


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


def make_tokenizer(words: Sequence[str], max_length: int) -> PreTrainedTokenizerFast:
    """One token a word; `<bos>` is added to every text that is encoded with special tokens.

    Args:
        words: the task's, in the order of their ids, which begin after the special tokens.
        max_length: longest sequence of the model, in tokens.
    """
    vocabulary = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=EOS,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


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
