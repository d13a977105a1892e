"""Turns a GGUF file of a Llama model into the folder that SGLang and Transformers load.

GGUF names and orders the same tensors otherwise, and quantizes them; its metadata has the
configuration, the tokenizer and the chat template. (Transformers can load GGUF, too, but that takes
the package accelerate.)
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
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
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
        gguf: the file, of a Llama model with a byte-level tokenizer.
        folder: is made, with its parents.
        dtype: of the weights; what GGUF holds in 4 bits has no exact value in bfloat16.

    Raises:
        ValueError: the file is not of a Llama model with a byte-level tokenizer.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
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
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    tokenizer(fields).save(str(folder / "tokenizer.json"))


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
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    return TENSORS[gguf_name]


def split_halves(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """Order the rows of a query or key projection, (heads * D, hidden), as Transformers does.

    GGUF lets rotary embedding turn neighbours, 0 with 1; Transformers turns 0 with D / 2.
    """
    pairs = weights.reshape(heads, -1, 2, weights.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE that takes digits one by one."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    made.decoder = ByteLevelDecoder()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    made.add_special_tokens(control)
    return made


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json, which all versions of Transformers read."""
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
