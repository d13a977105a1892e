"""What models of random weights need to take the time of trained ones: norms and a calibration.

SGLang's dummy weights are so small, norms included, that all logits of attention are equal: a
selection among equal scores takes several times as long as among those of any trained model.

A server that sketches keys needs a calibration, and random weights leave nothing to fit. So nothing
is corrected; only what the token before tells is a random direction, because queries of zero would
give all tokens the same score.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_ext import compat
from sglang_ext.calibration.files import Calibration, Card, Fit, sources, write
from sglang_ext.calibration.fitting import Correction
from sglang_ext.calibration.key_statistics import KeyBasis
from sglang_ext.prediction import FORECAST_GROUP_LAYERS
from sglang_ext.server_args import CacheRankServerArgs

DUMMY_LARGEST = 1e-3
"""SGLang draws dummy weights uniformly between this and its negative."""


def norms_for_unit_logits(config: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Weights of the norms before attention that make logits of about unit variance.

    The model is a Qwen3 or Llama. Names are as in a checkpoint.
    """
    hidden = config["hidden_size"]
    # A projection multiplies the standard deviation of a normalized vector by this.
    projection = DUMMY_LARGEST / math.sqrt(3) * math.sqrt(hidden)
    weights = {"input_layernorm": (hidden, 1 / projection)}
    if config["model_type"] == "qwen3":
        weights |= {f"self_attn.{name}": (config["head_dim"], 1.0) for name in ("q_norm", "k_norm")}
    return [
        (f"model.layers.{layer}.{name}.weight", torch.full((size,), value, dtype=torch.bfloat16))
        for layer in range(config["num_hidden_layers"])
        for name, (size, value) in weights.items()
    ]


def write_blank(folder: Path, config: dict[str, Any], engine: dict[str, Any]) -> None:
    """Write a calibration by a model's config.json and the arguments of its server.

    It has random directions where only these are told, and sketches keys as they are.
    """
    arguments = compat.default_values(CacheRankServerArgs) | engine
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    query_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // query_heads
    schedule = {
        "dense_layers": arguments["dense_layers"],
        "layers_per_group": arguments["layers_per_group"] or FORECAST_GROUP_LAYERS,
        "forecast_lead": arguments["forecast_lead"],
    }
    forecast = sources(layers, **schedule)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(hidden + 1, 1, generator=generator) / hidden**0.5
    query = torch.randn(1, query_heads * head_dim, generator=generator)
    corrections = {
        layer: Correction(direction * source.is_before, query) for layer, source in forecast.items()
    }
    bases = {
        layer: KeyBasis(torch.eye(head_dim).repeat(kv_heads, 1, 1), torch.zeros(kv_heads, head_dim))
        for layer in range(schedule["dense_layers"], layers)
    }
    card = Card(
        model="random",
        architecture=config["architectures"][0],
        hidden_size=hidden,
        layers=layers,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        **schedule,
        rank=1,
        ridge=0.0,
        texts={},
        held_out={},
        tokens=0,
        fits={
            layer: Fit(source.layer, 1.0, 1.0, 1.0, 1.0, source.is_before)
            for layer, source in forecast.items()
        },
    )
    write(folder, Calibration(card, corrections, bases))
