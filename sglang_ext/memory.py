"""What a cache rank takes of the memory that SGLang's pool would have: by its arguments alone.

Behind the rows that SGLang's allocator hands out, K and V buffers have

    the reserve    in every layer: the sinks and slots of each request that can be sparse
    kept rows      in dense layers, with `--inference-kv working-set`: every token of those requests
"""

from __future__ import annotations

from typing import Any, Protocol

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.protocol import DownMessage, UpMessage, group_sizes


class Arguments(Protocol):
    """What memory depends on, of CacheRankServerArgs; its module imports this one."""

    dense_layers: int
    inference_kv: Any
    max_sparse_requests: int
    sink_tokens: int
    sparse_budget: int

    def get_model_config(self) -> Any: ...

    def cache_rank_config(self, model: ModelShape, max_rows: int) -> CacheRankConfig: ...


def reserve_block_rows(args: Arguments) -> int:
    """Pool rows of one request's block in the reserve."""
    return args.sink_tokens + args.sparse_budget


def reserve_rows(args: Arguments) -> int:
    """Pool rows of the reserve."""
    return reserve_block_rows(args) * args.max_sparse_requests


def kept_rows_a_request(args: Arguments) -> int:
    """Kept rows of one request: one for each position that it may have."""
    if args.inference_kv == "full" or not args.dense_layers:
        return 0
    return int(args.get_model_config().context_len)


def kept_rows(args: Arguments) -> int:
    """Kept rows of a dense layer."""
    return kept_rows_a_request(args) * args.max_sparse_requests


def bytes_behind_pool(args: Arguments, layers: int, token_bytes: int) -> int:
    """Of all rows behind those that SGLang's allocator hands out.

    Args:
        args: the server's.
        layers: of the model.
        token_bytes: K and V of a token in one layer.
    """
    return token_bytes * (layers * reserve_rows(args) + args.dense_layers * kept_rows(args))


def message_bytes(args: Arguments, shape: ModelShape) -> int:
    """Of the buffers that messages of all sparse requests are staged and received in."""
    config = args.cache_rank_config(shape, args.max_sparse_requests)
    kinds = (UpMessage, DownMessage)
    return sum(sum(group_sizes(kind, config, config.max_rows)) for kind in kinds)
