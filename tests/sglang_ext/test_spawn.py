"""Parts of the inference rank that need neither an engine nor a cache rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import decode_step
from sglang_ext.supervisor import Place

# Where the ranks are.


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Place, float]]:
    spawned: list[tuple[str, Place, float]] = []
    monkeypatch.setattr(decode_step, "Supervisor", lambda *given: spawned.append(given))
    monkeypatch.setattr(decode_step, "_supervisor", None)
    monkeypatch.setattr(decode_step, "os", SimpleNamespace(environ={}))
    return spawned


def args_of(device: str, trace: str | None = None, memory: float | None = None) -> Any:
    return SimpleNamespace(
        device=device,
        trace=trace,
        cache_rank_address="127.0.0.1",
        cache_rank_timeout=5.0,
        cache_rank_mem_fraction=memory,
        cache_rank_transfer_backend="nccl",
        first_cache_rank_gpu=4,
    )


def test_cpu_ranks_are_on_the_cpu(places: list[tuple[str, Place, float]]) -> None:
    decode_step.spawn(args_of("cpu", "/a/trace", 0.5), 0, 0)
    place = Place("127.0.0.1", "cpu", "cpu", "/a/trace", 0.5)
    assert places == [("cache-rank-0", place, 5.0)]
    assert decode_step.os.environ == {}


def test_gpu_ranks_are_on_the_gpus_that_they_were_given(
    places: list[tuple[str, Place, float]],
) -> None:
    decode_step.spawn(args_of("cuda"), 1, 3)
    place = Place("127.0.0.1", "cuda:3", "cuda:5", transfer_backend="nccl")
    assert places == [("cache-rank-1", place, 5.0)]
    assert decode_step.os.environ["NCCL_SOCKET_IFNAME"] == "lo"
