"""Parts of the inference rank that need neither an engine nor a cache rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_working_set import small_config

from cache_rank.copies import Field, StepNumbers
from cache_rank.operations import operations_for
from sglang_ext import inference_rank
from sglang_ext.exchange import WorkingSetRows
from sglang_ext.inference_rank import ExchangeRow, InferenceRank, StepPlan
from sglang_ext.lifecycle import RequestStatistics, SparseSequence
from sglang_ext.supervisor import Place

CPU = torch.device("cpu")


def rank_of(**parts: Any) -> Any:
    """An inference rank that has nothing but the given parts."""
    rank: Any = object.__new__(InferenceRank)
    for name, value in parts.items():
        setattr(rank, name, value)
    return rank


def sequence_of(row: int = 1, block: int = 0, request: Any = None, **changes: Any) -> Any:
    return SparseSequence(1, request, row, block, 0, RequestStatistics(), **changes)


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_sinks_are_copied_into_the_block_and_nowhere_else(sinks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        [torch.randn((30, 2, 3), generator=generator) for _ in range(2)] for _ in range(2)
    )
    before = [buffer.clone() for buffer in (*keys, *values)]
    true = torch.tensor([[0] * 6, [9, 3, 7, 5, 1, 2]], dtype=torch.int32)
    config = small_config(sink_tokens=sinks)
    rank = rank_of(
        config=config,
        device=CPU,
        _req_to_token=true,
        _operations=operations_for(CPU),
        _working_sets=WorkingSetRows(config, keys, values),
    )
    rank._copy_sinks(sequence_of(row=1, block=20))
    for buffer, old in zip((*keys, *values), before, strict=True):
        expected = old.clone()
        for token in range(sinks):
            expected[20 + token] = old[true[1, token].item()]
        assert torch.equal(buffer, expected)


def test_a_step_brings_lengths_and_exchanged_rows_to_the_device() -> None:
    """A captured graph reads rows beyond those of the batch."""
    numbers = StepNumbers(
        CPU,
        steps=Field(2, 0),
        exchanged=Field(6, -1),
        lengths=Field(6, 1),
        sources=Field(6, 0),
        targets=Field(6, 0),
    )
    rank = rank_of(device=CPU, table=Mock(), gate=Mock(), _numbers=numbers)
    rank.gate.plan_step.return_value = (7, 8)
    plan = StepPlan([9, 4, 7], torch.empty(0), [], [], [])
    plan.rows = [ExchangeRow(sequence_of(), index, 5, 0) for index in (2, 0)]
    rank._upload(plan, ([1, 2, 3], [4, 5, 6]))
    assert plan.lengths.tolist() == [9, 4, 7, 1, 1, 1]
    ((sources, targets), _) = rank.table.advance.call_args
    assert sources.tolist() == [1, 2, 3]
    assert targets.tolist() == [4, 5, 6]
    rank.gate.plan_step.assert_called_once_with(True)
    assert numbers["steps"].tolist() == [7, 8]
    assert numbers["exchanged"].tolist() == [1, -1, 0, -1, -1, -1]


# Where the ranks are.


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Place, float]]:
    spawned: list[tuple[str, Place, float]] = []
    monkeypatch.setattr(inference_rank, "Supervisor", lambda *given: spawned.append(given))
    monkeypatch.setattr(inference_rank, "_supervisor", None)
    monkeypatch.setattr(inference_rank, "os", SimpleNamespace(environ={}))
    return spawned


def args_of(device: str, trace: str | None = None) -> Any:
    return SimpleNamespace(
        device=device,
        trace=trace,
        cache_rank_address="127.0.0.1",
        cache_rank_timeout=5.0,
        first_cache_rank_gpu=4,
    )


def test_cpu_ranks_are_on_the_cpu(places: list[tuple[str, Place, float]]) -> None:
    inference_rank.spawn(args_of("cpu", "/a/trace"), 0, 0)
    place = Place("127.0.0.1", "cpu", "cpu", "/a/trace")
    assert places == [("cache-rank-0", place, 5.0)]
    assert inference_rank.os.environ == {}


def test_gpu_ranks_are_on_the_gpus_that_they_were_given(
    places: list[tuple[str, Place, float]],
) -> None:
    inference_rank.spawn(args_of("cuda"), 1, 3)
    assert places == [("cache-rank-1", Place("127.0.0.1", "cuda:3", "cuda:5"), 5.0)]
    assert inference_rank.os.environ["NCCL_SOCKET_IFNAME"] == "lo"
