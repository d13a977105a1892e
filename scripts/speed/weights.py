"""Random weights whose attention looks at some tokens more than at others, as trained weights do.

SGLang's dummy weights are so small, norms included, that all logits of attention are equal: a
selection among equal scores takes several times as long as among those of any trained model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

DUMMY_LARGEST = 1e-3
"""SGLang draws dummy weights uniformly between this and its negative."""


def norms_for_unit_logits(config: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Weights of the norms before attention that make logits of about unit variance.

    Args:
        config: the config.json of a Qwen3 or Llama model.

    Returns:
        Names as in a checkpoint, and values in bfloat16.
    """
    hidden = config["hidden_size"]
    # A projection multiplies the standard deviation of a normalized vector by this.
    projection = DUMMY_LARGEST / math.sqrt(3) * math.sqrt(hidden)
    weights = {"input_layernorm": (hidden, 1 / projection)}
    if config["model_type"] == "qwen3":
        weights |= {f"self_attn.{name}": (config["head_dim"], 1.0) for name in ("q_norm", "k_norm")}
    return [
        (
            f"model.layers.{layer}.{name}.weight",
            torch.full((size,), value, dtype=torch.bfloat16),
        )
        for layer in range(config["num_hidden_layers"])
        for name, (size, value) in weights.items()
    ]
