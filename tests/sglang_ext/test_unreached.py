"""Settings that hardly help are named once at start-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.unreached import say_small_capacity, say_unreached_settings


def args_of(
    threshold: int = 4096, sparse: int = 32, running: int | None = None, swap: int = 128
) -> Any:
    return SimpleNamespace(
        sparse_threshold=threshold,
        sparse_budget=2048,
        max_sparse_requests=sparse,
        max_running_requests=running,
        max_swap_tokens=swap,
    )


@pytest.mark.parametrize(
    ("args", "context_length", "named"),
    [
        (args_of(), 4097, None),
        (args_of(), 4096, "--sparse-threshold 4096"),
        (args_of(), 1024, "the context ends at 1024 tokens"),
        (args_of(running=32), 8192, None),
        (args_of(running=33), 8192, "--max-sparse-requests 32: up to 33 requests"),
        (args_of(swap=32), 8192, None),
        (args_of(swap=31), 8192, "--max-swap-tokens 31: a request stays dense for 67 steps"),
    ],
)
def test_what_keeps_requests_dense_or_slow_is_named(
    args: Any, context_length: int, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    say_unreached_settings(args, context_length)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (named is not None)
    assert named is None or named in caplog.text


@pytest.mark.parametrize(("capacity", "warns"), [(8192, False), (8191, True)])
def test_a_small_cache_rank_says_that_max_tokens_is_needed(
    capacity: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    say_small_capacity(capacity, 8192)
    assert ("Have clients set max_tokens" in caplog.text) is warns
