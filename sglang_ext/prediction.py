"""How the queries of a step are predicted on a cache rank, where the user does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache_rank.config import CacheRankConfig, ModelShape

FORECAST_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Queries of these are forecast by default; those of others can be, if the user says so."""

FORECAST_ROTARY_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Rotary embeddings of these types rotate alike in requests of all lengths; see rotary.py."""

FORECAST_GROUP_LAYERS = 2
HISTORY_GROUP_LAYERS = CacheRankConfig(ModelShape(1, 1, 1, 8, "bfloat16", 1.0)).layers_per_group
"""Layers of a group where queries are forecast, and where they are predicted from earlier ones."""


def choose_schedule(
    query_predictor: str | None,
    layers_per_group: int | None,
    forecast_lead: int,
    architecture: str,
    rotary_type: str,
    sparse_layers: int,
) -> tuple[str, int, str]:
    """Choose what the user leaves open (None), by the model's class and its sparse layers.

    Returns:
        The query predictor, the layers of a group, and why it is that predictor.
    """
    why = "as asked for"
    if query_predictor is None:
        groups = -(-sparse_layers // (layers_per_group or FORECAST_GROUP_LAYERS))
        query_predictor, why = "forecast", "from the hidden state of the same step"
        if architecture not in FORECAST_ARCHITECTURES:
            query_predictor, why = "last", "forecasts are not tested with this model"
        elif rotary_type not in FORECAST_ROTARY_TYPES:
            query_predictor, why = "last", f"a forecast cannot rotate by {rotary_type}"
        elif groups <= forecast_lead:
            query_predictor = "last"
            why = f"--forecast-lead {forecast_lead} needs more layer groups than {groups}"
    if layers_per_group is None:
        is_forecast = query_predictor == "forecast"
        layers_per_group = FORECAST_GROUP_LAYERS if is_forecast else HISTORY_GROUP_LAYERS
    return query_predictor, layers_per_group, why


def rotary_type(model: Mapping[str, Any]) -> str:
    """The kind of rotary embedding that a model's config.json names, in either of its forms."""
    rotary = model.get("rope_parameters") or model.get("rope_scaling") or {}
    return str(rotary.get("rope_type") or rotary.get("type") or "default")
