"""Parts of the inference rank that need neither an engine nor a cache rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import inference_rank
from sglang_ext.exchange.connection import Placement

# Where the ranks are.


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Placement, float, float]]:
    spawned: list[tuple[str, Placement, float, float]] = []
    monkeypatch.setattr(inference_rank, "Supervisor", lambda *given: spawned.append(given))
    monkeypatch.setattr(inference_rank, "_supervisor", None)
    monkeypatch.setattr(inference_rank, "os", SimpleNamespace(environ={}))
    return spawned


def args_of(device: str, trace: str | None = None, memory: float | None = None) -> Any:
    return SimpleNamespace(
        device=device,
        trace=trace,
        cache_rank_address="127.0.0.1",
        cache_rank_timeout=5.0,
        cache_rank_max_restart_delay=30.0,
        cache_rank_mem_fraction=memory,
        cache_rank_host_gb=0.5,
        cache_rank_transfer_backend="nccl",
        first_cache_rank_gpu=4,
    )


def test_gpu_ranks_are_on_the_gpus_that_they_were_given(
    placements: list[tuple[str, Placement, float, float]],
) -> None:
    inference_rank.spawn(args_of("cuda"), 1, 3)
    placement = Placement(
        "127.0.0.1", "cuda:3", "cuda:5", host_bytes=500_000_000, transfer_backend="nccl"
    )
    assert placements == [("cache-rank-1", placement, 5.0, 30.0)]
    assert inference_rank.os.environ["NCCL_SOCKET_IFNAME"] == "lo"
