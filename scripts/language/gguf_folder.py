"""Turns a GGUF file of a Llama model into the folder that SGLang and Transformers load.

Transformers reads the configuration and the weights of such a file. (For the whole way it wants the
package accelerate, and its tokenizer would not take digits one by one.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

CONTROL_TOKEN = 3
"""GGUF's type of a token that no text contains."""


def write_folder(gguf: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, model.safetensors, the tokenizer and the chat template.

    Args:
        gguf: the file, of a Llama model with a byte-level tokenizer.
        folder: is made, with its parents.
        dtype: of the weights; what GGUF holds in 4 bits has no exact value in bfloat16.

    Raises:
        ValueError: Transformers reads no file of this architecture.
    """
    config = model_config(gguf, dtype)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer(gguf).save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    tensors = {name: tensor.to(dtype) for name, tensor in loaded["tensors"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def model_config(gguf: Path, dtype: torch.dtype) -> Any:
    """The configuration of the model."""
    config = load_gguf_checkpoint(str(gguf))["config"]
    # GGUF holds float32: 1e-5 comes back as 9.999999747378752e-06.
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    return LlamaConfig(**config, architectures=["LlamaForCausalLM"], dtype=dtype)


def tokenizer(gguf: Path) -> Any:
    """A byte-level BPE that takes digits one by one, and the chat template."""
    fields = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in GGUFReader(gguf).fields.items()
    }
    tokens, kinds = fields["ggml.tokens"], fields["ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    made = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
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
