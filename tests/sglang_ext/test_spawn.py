"""Where the ranks of a server on GPUs are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.two_ranks import inference_rank
from sglang_ext.two_ranks.exchange.connection import ProcessSettings


def test_gpu_ranks_are_on_the_gpus_that_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[Any] = []
    monkeypatch.setattr(inference_rank, "Supervisor", lambda *given: spawned.append(given))
    monkeypatch.setattr(inference_rank, "_supervisor", None)
    monkeypatch.setattr(inference_rank, "os", SimpleNamespace(environ={}))
    args: Any = SimpleNamespace(
        device="cuda",
        trace=None,
        cache_rank_address="127.0.0.1",
        cache_rank_timeout=5.0,
        cache_rank_max_restart_delay=30.0,
        cache_rank_mem_fraction=None,
        cache_rank_host_gb=0.5,
        cache_rank_transfer_backend="nccl",
        first_cache_rank_gpu=4,
    )
    inference_rank.spawn(args, 1, 3)
    settings = ProcessSettings(
        "127.0.0.1", "cuda:3", "cuda:5", host_bytes=500_000_000, transfer_backend="nccl"
    )
    assert spawned == [("cache-rank-1", settings, 5.0, 30.0)]
    assert inference_rank.os.environ["NCCL_SOCKET_IFNAME"] == "lo"
