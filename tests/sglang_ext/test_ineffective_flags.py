"""Settings that hardly help are named once at start-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.ineffective_flags import warn_ineffective_flags, warn_small_capacity


def args_of(threshold: int = 4096, sparse: int = 32, **changes: Any) -> Any:
    usual = {
        "sparse_threshold": threshold,
        "sparse_budget": 2048,
        "max_swap_tokens": 128,
        "max_sparse_requests": sparse,
        "max_running_requests": None,
        "max_total_tokens": None,
        "reuse_sparse_tokens": "off",
        "disable_radix_cache": False,
        "cache_rank_transfer_backend": "auto",
        "on_gpu": False,
    }
    return SimpleNamespace(**{**usual, **changes})


@pytest.mark.parametrize(
    ("args", "context_length", "named"),
    [
        (args_of(), 4097, None),
        (args_of(), 4096, "--sparse-threshold 4096"),
        (args_of(), 1024, "the context ends at 1024 tokens"),
        (args_of(max_running_requests=32), 8192, None),
        (args_of(max_running_requests=33), 8192, "--max-sparse-requests 32: up to 33 requests"),
        (args_of(max_swap_tokens=32), 8192, None),
        (args_of(max_swap_tokens=31), 8192, "--max-swap-tokens 31: a request stays dense for 67"),
        (args_of(max_total_tokens=4097, reuse_sparse_tokens="on"), 8192, None),
        (args_of(max_total_tokens=4096), 8192, "--max-total-tokens 4096"),
        (args_of(reuse_sparse_tokens="on", disable_radix_cache=True), 8192, "nothing is reused"),
        (
            args_of(cache_rank_transfer_backend="peer"),
            8192,
            "cache_rank_transfer_backend peer has no effect",
        ),
        (args_of(cache_rank_transfer_backend="peer", on_gpu=True), 8192, None),
    ],
)
def test_what_keeps_requests_dense_or_slow_is_named(
    args: Any, context_length: int, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_ineffective_flags(args, context_length)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (named is not None)
    assert named is None or named in caplog.text


@pytest.mark.parametrize(("capacity", "warns"), [(8192, False), (8191, True)])
def test_a_small_cache_rank_says_that_max_tokens_is_needed(
    capacity: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_small_capacity(capacity, 8192)
    assert ("Have clients set max_tokens" in caplog.text) is warns
