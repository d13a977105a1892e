"""Settings that hardly help are named once at start-up."""

from __future__ import annotations

from typing import Any

import pytest
from parsed_args import Make

from sglang_ext.ineffective_flags import warn_ineffective_flags, warn_small_capacity

CHOSEN = {"hysteresis": 256, "max_swap_tokens": 128}
"""What start-up chooses."""


@pytest.mark.parametrize(
    ("fields", "context_length", "named"),
    [
        ({}, 1025, None),
        ({}, 1024, "--sparse-threshold: no request has 1024 tokens"),
        ({"max_running_requests": 32}, 8192, None),
        ({"max_running_requests": 65}, 8192, "--max-sparse-requests 64: up to 65 requests"),
        ({"max_swap_tokens": 15}, 8192, "--max-swap-tokens 15: a request stays dense for 69"),
        ({"max_total_tokens": 1025, "reuse_sparse_tokens": "on"}, 8192, None),
        ({"max_total_tokens": 1024}, 8192, "--max-total-tokens 1024"),
        ({"reuse_sparse_tokens": "on", "disable_radix_cache": True}, 8192, "nothing is reused"),
        (
            {"cache_rank_transfer_backend": "peer"},
            8192,
            "cache_rank_transfer_backend peer: this has no effect",
        ),
        ({"cache_rank_host_gb": 1.0}, 8192, None),
        (
            {"cache_rank_host_gb": 1.0, "kv_residency": "mosaickv"},
            8192,
            "--cache-rank-host-gb 1.0: no prompt is kept",
        ),
        ({"hysteresis": 2048}, 8192, "--hysteresis 2048: tokens hardly leave"),
        ({"calibration": "folder", "query_predictor": "forecast"}, 8192, None),
        ({"calibration": "folder", "query_predictor": "last"}, 8192, "--calibration folder: "),
    ],
)
def test_what_is_without_effect_is_named(
    fields: dict[str, Any],
    context_length: int,
    named: str | None,
    make: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_ineffective_flags(make(**CHOSEN | fields), context_length)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (named is not None)
    assert named is None or named in caplog.text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_running_requests": 64}, None),
        ({"max_total_tokens": 1024}, "--max-total-tokens 1024"),
        ({"reuse_sparse_tokens": "on", "disable_radix_cache": True}, "nothing is reused"),
    ],
)
def test_what_is_without_effect_inline_is_named(
    fields: dict[str, Any], named: str | None, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    warn_ineffective_flags(make(cache_rank_gpus=None, **fields), 8192)
    assert len(caplog.records) == (named is not None)
    assert named is None or named in caplog.text


@pytest.mark.parametrize(("capacity", "warns"), [(8192, False), (8191, True)])
def test_a_small_cache_rank_says_that_max_tokens_is_needed(
    capacity: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_small_capacity(capacity, 8192)
    assert ("Have clients set max_tokens" in caplog.text) is warns
