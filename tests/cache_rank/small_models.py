"""Model shapes small enough to compute by hand, one for each way of sharing kv heads."""

from __future__ import annotations

from typing import Any

import msgspec

from cache_rank.config import CacheRankConfig, ModelShape

MHA = ModelShape(3, query_heads=2, kv_heads=2, head_dim=8, dtype="float32", scale=8**-0.5)
GQA = ModelShape(3, query_heads=4, kv_heads=2, head_dim=8, dtype="bfloat16", scale=8**-0.5)
MQA = ModelShape(3, query_heads=3, kv_heads=1, head_dim=8, dtype="float16", scale=8**-0.5)
MODELS = {"mha": MHA, "gqa": GQA, "mqa": MQA}

FORECAST = {
    name: msgspec.structs.replace(model, layers=6, hidden_size=20, query_norm_epsilon=epsilon)
    for (name, model), epsilon in zip(MODELS.items(), (1e-6, None, 1e-5), strict=True)
}
"""The same with layers enough for a forecast; norms of queries in some."""

ROTARY_FREQUENCY = tuple(10_000.0 ** (-2 * pair / 8) for pair in range(4))


def with_rotary(model: ModelShape, interleaved: bool = False) -> ModelShape:
    return msgspec.structs.replace(
        model, rotary_frequency=ROTARY_FREQUENCY, rotary_interleaved=interleaved
    )


def small_config(model: ModelShape = GQA, **changes: Any) -> CacheRankConfig:
    """A policy whose every rule shows within a few dozen tokens."""
    policy: dict[str, Any] = {
        "layers_per_group": 2,
        "sparse_budget": 8,
        "sink_tokens": 2,
        "recent_tokens": 4,
        "query_window": 4,
        "query_frame": "post",
        "hysteresis": 3,
        "max_swap_tokens": 3,
        "kv_residency": "bf16",
        "max_rows": 4,
    }
    return CacheRankConfig(model, **{**policy, **changes})
