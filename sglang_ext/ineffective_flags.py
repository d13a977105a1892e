"""Warnings of flags that have no effect, or hardly any, beside the others."""

from __future__ import annotations

import logging

from sglang_ext.flags import CacheRankFlags, flag_of

logger = logging.getLogger(__name__)

_LONGEST_FILL = 64
"""More steps than this before a request turns sparse are worth a word; by default there are 16."""


def warn_ineffective_flags(args: CacheRankFlags, context_length: int) -> None:
    """Warn of each setting that keeps requests dense.

    Args:
        args: the server's arguments, complete.
        context_length: the most tokens of a request.
    """
    if args.sparse_threshold >= context_length:
        logger.warning(
            "cache rank: --sparse-threshold %d: no request gets there, because the context ends "
            "at %d tokens. All stay dense; lower it.",
            args.sparse_threshold,
            context_length,
        )
    if args.max_total_tokens is not None and args.max_total_tokens <= args.sparse_threshold:
        logger.warning(
            "cache rank: --max-total-tokens %d: no request gets to --sparse-threshold %d in such a "
            "pool. All stay dense; raise it, or lower the threshold.",
            args.max_total_tokens,
            args.sparse_threshold,
        )
    if args.reuse_sparse_tokens == "on" and args.disable_radix_cache:
        logger.warning(
            "cache rank: --reuse-sparse-tokens on: nothing is reused without a radix cache"
        )
    if args.cache_rank_transfer_backend != "auto" and not args.on_gpu:
        logger.warning(
            "cache rank: %s %s has no effect: the ranks run on CPUs",
            flag_of("cache_rank_transfer_backend"),
            args.cache_rank_transfer_backend,
        )
    running = args.max_running_requests
    if running is not None and args.max_sparse_requests < running:
        logger.warning(
            "cache rank: --max-sparse-requests %d: up to %d requests run at once "
            "(--max-running-requests), and those beyond it stay dense. Raise it, or lower the "
            "other.",
            args.max_sparse_requests,
            running,
        )
    assert args.max_swap_tokens is not None
    fill = -(-args.sparse_budget // args.max_swap_tokens)
    if fill > _LONGEST_FILL:
        logger.warning(
            "cache rank: --max-swap-tokens %d: a request stays dense for %d steps while "
            "--sparse-budget %d fills, and later a selection changes as slowly. Raise it.",
            args.max_swap_tokens,
            fill,
            args.sparse_budget,
        )


def warn_small_capacity(capacity_tokens: int, context_length: int) -> None:
    """Warn that a request of unknown length does not fit on the cache rank.

    Args:
        capacity_tokens: how many tokens fit there.
        context_length: the most tokens of a request, which is what one without `max_tokens`
            reserves.
    """
    if capacity_tokens < context_length:
        logger.warning(
            "cache rank: %d tokens fit, and a request without max_tokens reserves %d, the context "
            "length: it stays dense. Have clients set max_tokens, or pass --context-length.",
            capacity_tokens,
            context_length,
        )
