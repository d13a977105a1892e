"""Turns a GGUF file of a Llama model into the folder that SGLang and Transformers load.

GGUF names and orders the same tensors otherwise, and quantizes them; its metadata has the
configuration, the tokenizer and the chat template. Everything is written by this file, from these
alone, so that the same GGUF file gives the same bytes whatever is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tqdm import tqdm

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's tensors, of GGUF and of Transformers."""

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

CONTROL_TOKEN = 3
"""GGUF's type of a token that no text contains."""


def write_folder(gguf: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, model.safetensors, the tokenizer and the chat template.

    Args:
        gguf: the file.
        folder: is made, with its parents.
        dtype: of the weights; what GGUF holds in 4 bits has no exact value in bfloat16.

    Raises:
        ValueError: the file is not of a Llama model with a byte-level tokenizer.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kinds = (fields["general.architecture"], fields["tokenizer.ggml.model"])
    if kinds != ("llama", "gpt2"):
        raise ValueError(f"{gguf}: has architecture and tokenizer {kinds}, not ('llama', 'gpt2')")
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model_config(fields), "dtype": str(dtype).removeprefix("torch.")}
    tensors = {}
    for tensor in tqdm(reader.tensors, "dequantize", unit="tensor", disable=None):
        name, weights = tensor.name, dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            query = name.endswith("attn_q.weight")
            heads = config["num_attention_heads" if query else "num_key_value_heads"]
            weights = split_halves(weights, heads)
        tensors[tensor_name(name)] = torch.from_numpy(np.array(weights, np.float32)).to(dtype)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer.json", tokenizer(fields))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the model, from GGUF's metadata."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF holds float32: 1e-5 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rope_parameters": {
            "rope_theta": float(fields["llama.rope.freq_base"]),
            "rope_type": "default",
        },
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tensor_name(gguf_name: str) -> str:
    """The name that Transformers gives a tensor.

    Raises:
        ValueError: a Llama model has no such tensor.
    """
    parts = gguf_name.split(".")
    if parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    if gguf_name not in TENSORS:
        raise ValueError(f"no tensor of a Llama model is named {gguf_name}")
    return TENSORS[gguf_name]


def split_halves(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """Order the rows of a query or key projection, (heads * D, hidden), as Transformers does.

    GGUF lets rotary embedding turn neighbours, 0 with 1; Transformers turns 0 with D / 2.
    """
    pairs = weights.reshape(heads, -1, 2, weights.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE that takes digits one by one."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    as_it_is = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **as_it_is, "special": True}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in names.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **special,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
