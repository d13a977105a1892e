"""Warnings of flags that have no effect, or hardly any, beside the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from sglang_ext.flags import CacheRankFlags
from sglang_ext.refusals import Objection

logger = logging.getLogger(__name__)

_LONGEST_FILL = 64
"""More steps than this before a request turns sparse are worth a word; by default there are 16."""


def warn_ineffective_flags(args: CacheRankFlags, context_length: int) -> None:
    """Warn of each setting that is without effect, or keeps requests dense."""
    for objection in _ineffective(args, context_length):
        logger.warning("cache rank: %s", objection.message(args))


def _ineffective(args: CacheRankFlags, context_length: int) -> Iterator[Objection]:
    threshold, pool = args.sparse_from, args.max_total_tokens
    if threshold >= context_length:
        why = f"no request has {threshold} tokens, because the context ends at {context_length}"
        yield Objection("--sparse-threshold", why, "lower it, or all stay dense")
    if pool is not None and pool <= threshold:
        why = f"no request has the {threshold} tokens of --sparse-threshold in such a pool"
        yield Objection("--max-total-tokens", why, "raise it, or all stay dense")
    if args.reuse_sparse_tokens == "on" and args.disable_radix_cache:
        yield Objection("--reuse-sparse-tokens", "nothing is reused without a radix cache")
    if args.has_cache_rank:
        yield from _ineffective_with_a_cache_rank(args)


def _ineffective_with_a_cache_rank(args: CacheRankFlags) -> Iterator[Objection]:
    running = args.max_running_requests
    if running is not None and args.max_sparse_requests < running:
        why = f"up to {running} requests run at once, and those beyond it stay dense"
        yield Objection("--max-sparse-requests", why, "raise it, or lower --max-running-requests")
    if args.cache_rank_transfer_backend != "auto" and not args.on_gpu:
        why = "this has no effect, because the ranks run on CPUs"
        yield Objection("--cache-rank-transfer-backend", why)
    without_reuse = args.disable_radix_cache and args.inference_kv == "full"
    if args.cache_rank_host_gb and (without_reuse or args.kv_residency == "mosaickv"):
        yield Objection("--cache-rank-host-gb", "no prompt is kept that no request has")
    forecasts, sketches = args.query_predictor == "forecast", args.score_keys == "sketch"
    if args.calibration is not None and not forecasts and not sketches:
        why = f"it is of forecasts and sketches, and --query-predictor is {args.query_predictor}"
        yield Objection("--calibration", why)
    budget = args.budget_curve.most
    assert args.hysteresis is not None
    if args.hysteresis >= budget:
        why = f"tokens hardly leave a working set of --sparse-budget {budget}"
        yield Objection("--hysteresis", why, "lower it, or drop it for an eighth of the budget")
    assert args.max_swap_tokens is not None
    fill = -(-budget // args.max_swap_tokens)
    if fill > _LONGEST_FILL:
        why = (
            f"a request stays dense for {fill} steps while --sparse-budget {budget} "
            "fills, and later a selection changes as slowly"
        )
        yield Objection("--max-swap-tokens", why, "raise it")


def warn_small_capacity(capacity_tokens: int, context_length: int) -> None:
    """Warn that a request of unknown length does not fit on the cache rank."""
    if capacity_tokens < context_length:
        logger.warning(
            "cache rank: %d tokens fit, and a request without max_tokens reserves %d, the context "
            "length: it stays dense. Have clients set max_tokens, or pass --context-length.",
            capacity_tokens,
            context_length,
        )
