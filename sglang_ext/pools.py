"""SGLang's pools and the shape of its attention layers, as its model runner has them."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_rank.config import ModelShape
from sglang_ext.memory import dense_store_rows, reserve_rows
from sglang_ext.projections import decoder_layers
from sglang_ext.rotary import Rotary, rotary_of
from sglang_ext.server_args import CacheRankServerArgs

logger = logging.getLogger(__name__)


class Pools(NamedTuple):
    """SGLang's memory.

    Attributes:
        req_to_token: (request slots, context length) int32 pool rows.
        keys, values: per layer (pool rows and reserve rows, Hkv, D); those of dense layers may have
            the dense store behind them; see memory.py.
    """

    req_to_token: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    allocator: Any


def pools_of(runner: Any, args: CacheRankServerArgs) -> Pools:
    """Return SGLang's pools, whose buffers have been made with rows of our own.

    Raises:
        ValueError: they have not.
    """
    pool = runner.token_to_kv_pool
    rows = pool.size + pool.page_size + reserve_rows(args)
    found = pool.k_buffer[0].shape[0], pool.k_buffer[-1].shape[0]
    if found != (rows + dense_store_rows(args), rows):
        raise ValueError(
            f"the KV pool has {found} rows in its first and last layer, not "
            f"{rows + dense_store_rows(args)} and {rows}: it is not SGLang's usual pool"
        )
    return Pools(
        runner.req_to_token_pool.req_to_token,
        pool.k_buffer,
        pool.v_buffer,
        runner.token_to_kv_pool_allocator,
    )


def first_reserve_row(pools: Pools, args: CacheRankServerArgs) -> int:
    """Return where the reserve begins; the buffers of sparse layers end with it."""
    return pools.keys[-1].shape[0] - reserve_rows(args)


def attention_layers(runner: Any) -> list[Any]:
    found = [part for part in runner.model.modules() if type(part).__name__ == "RadixAttention"]
    pool_layers = len(runner.token_to_kv_pool.k_buffer)
    if len(found) != pool_layers or found[0].qk_head_dim != found[0].v_head_dim:
        raise ValueError("the model's attention layers do not match its KV pool")
    return found


def model_shape(runner: Any, dense_layers: int, forecasts: bool) -> ModelShape:
    """Read the shape of the sparse layers off a loaded model.

    Raises:
        ValueError: they are not built as they have to be.
    """
    pool, first = runner.token_to_kv_pool, attention_layers(runner)[0]
    rotary = _rotary(runner.model, forecasts)
    return ModelShape(
        layers=len(pool.k_buffer) - dense_layers,
        query_heads=first.tp_q_head_num,
        kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        dtype=str(pool.dtype).removeprefix("torch."),
        scale=float(first.scaling),
        rotary_frequency=rotary.frequency,
        rotary_interleaved=rotary.interleaved,
        rotary_scale=rotary.scale,
        **(_hidden_state(runner.model) if forecasts else {}),
    )


def _hidden_state(model: torch.nn.Module) -> dict[str, Any]:
    """Read what forecasts need to know of the hidden state and its norms."""
    layer = decoder_layers(model)[-1]
    norm = layer.query_norm
    return {
        "hidden_size": layer.input_norm.weight.shape[0],
        "norm_epsilon": layer.input_norm.variance_epsilon,
        "query_norm_epsilon": None if norm is None else norm.variance_epsilon,
    }


def _rotary(model: torch.nn.Module, forecasts: bool) -> Rotary:
    """The rotary embedding of queries, if it can be told; forecasts need it."""
    try:
        return rotary_of(model)
    except ValueError as error:
        if forecasts:
            raise ValueError(
                f"queries cannot be forecast: {error}; pass --query-predictor last"
            ) from error
        logger.warning("cache rank: queries are not rotated to the next position: %s", error)
        return Rotary()
