"""How much memory of SGLang's pool a cache rank takes, by a server's arguments alone.

Beyond the rows that SGLang's allocator hands out, K and V buffers have rows of our own:

    the reserve      in every layer: the sinks and slots of each request that can be sparse
    the dense store  in dense layers, with `--inference-kv working-set`: every token of those
                     requests, whose pool rows are evicted
"""

from __future__ import annotations

import os

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.measure.recording import RECORD_VARIABLE
from cache_rank.protocol import down_sizes, up_sizes
from cache_rank.residency.encoding import tokens_as_codes
from sglang_ext.compat import model_config
from sglang_ext.flags import CacheRankFlags

SHIPPED_TOKENS = 4096
"""Prompts on their way to a cache rank take as much memory as so many tokens, or one chunk."""


def reserve_block_rows(args: CacheRankFlags) -> int:
    return args.sink_tokens + args.budget_curve.most


def reserve_rows(args: CacheRankFlags) -> int:
    return reserve_block_rows(args) * args.max_sparse_requests


def dense_store_rows_per_request(args: CacheRankFlags) -> int:
    """Return the rows of one request in the dense store: one a position that it may have."""
    if args.inference_kv == "full" or not args.dense_layers:
        return 0
    return int(model_config(args).context_len)


def dense_store_rows(args: CacheRankFlags) -> int:
    """Return the rows of the dense store in one layer."""
    return dense_store_rows_per_request(args) * args.max_sparse_requests


def bytes_beyond_allocator(args: CacheRankFlags, layers: int, token_bytes: int) -> int:
    """Return the bytes of all rows beyond the allocator's; those of a token are of one layer."""
    return token_bytes * (layers * reserve_rows(args) + args.dense_layers * dense_store_rows(args))


def coded_tokens(args: CacheRankFlags, config: CacheRankConfig) -> int:
    """Return how many tokens of a prompt are shipped as codes at once; 0 if none are.

    A recording holds what each request has shipped, as it is.
    """
    if os.environ.get(RECORD_VARIABLE):
        return 0
    return tokens_as_codes(config, args.bulk_chunk_tokens)


def message_bytes(args: CacheRankFlags, shape: ModelShape) -> int:
    """Return the bytes of the buffers of messages, and of prompts on their way."""
    config = args.cache_rank_config(shape, args.max_sparse_requests)
    steps = sum(up_sizes(config, config.max_rows)) + sum(down_sizes(config, config.max_rows))
    shipped = max(SHIPPED_TOKENS, args.bulk_chunk_tokens) + coded_tokens(args, config)
    return steps + shipped * shape.bytes_per_token
