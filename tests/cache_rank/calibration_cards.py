"""Cards of calibrations, for tests that need one and do not care which."""

from __future__ import annotations

from typing import Any

from sglang_ext.calibration.files import Card


def make_card(**changes: Any) -> Card:
    """The card of a calibration without corrections."""
    values: dict[str, Any] = {
        "model": "somewhere",
        "architecture": "LlamaForCausalLM",
        "hidden_size": 24,
        "layers": 4,
        "query_heads": 8,
        "kv_heads": 4,
        "head_dim": 32,
        "dense_layers": 1,
        "layers_per_group": 1,
        "forecast_lead": 1,
        "rank": 3,
        "ridge": 0.01,
        "texts": {},
        "held_out": {},
        "tokens": 400,
        "fits": {},
    }
    return Card(**values | changes)
