"""Tokens that the cache rank has go back to the pool, each once, some at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_requests import fake_request

from cache_rank.budget import BudgetCurve
from sglang_ext.pools import Pools
from sglang_ext.request_state import RequestStatistics
from sglang_ext.two_ranks.eviction import EVICTION_STRIDE, Eviction
from sglang_ext.two_ranks.lifecycle import SparseSequence

RECENT = 3
PROMPT_IN_POOL = 10
REQ_TO_TOKEN = torch.arange(4 * 500, dtype=torch.int32).view(4, 500)


class Allocator:
    """SGLang's, as far as it is used."""

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, pool_rows: torch.Tensor) -> None:
        assert pool_rows.dtype == torch.int64
        self.freed += pool_rows.tolist()


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


def args_of(dense_layers: int) -> Any:
    return SimpleNamespace(
        recent_tokens=RECENT,
        dense_layers=dense_layers,
        sink_tokens=2,
        budget_curve=BudgetCurve.flat(5),
        max_sparse_requests=2,
        inference_kv="working-set",
    )


@pytest.fixture
def eviction(allocator: Allocator) -> Eviction:
    return Eviction(args_of(dense_layers=0), Pools(REQ_TO_TOKEN, [], [], allocator))


def sequence_of(row: int, protected: int = 0) -> Any:
    request = fake_request(cache_protected_len=protected)
    return SparseSequence(1, request, row, 0, 0, RequestStatistics())


def test_tokens_are_freed_some_at_a_time_each_once(
    eviction: Eviction, allocator: Allocator
) -> None:
    sequence = sequence_of(row=2)
    for position in range(PROMPT_IN_POOL, 300):
        before = len(allocator.freed)
        eviction.note(sequence, position)
        freed_any = eviction.evict()
        gone = len(allocator.freed)
        assert gone - before == (EVICTION_STRIDE if freed_any else 0)
        assert position - RECENT - EVICTION_STRIDE < gone <= max(0, position - RECENT)
        assert sequence.request.cache_protected_len == gone, "SGLang frees the rest"
    assert allocator.freed == REQ_TO_TOKEN[2, : len(allocator.freed)].tolist()


def test_what_sglang_protects_is_not_freed(eviction: Eviction, allocator: Allocator) -> None:
    sequence = sequence_of(row=1, protected=50)
    eviction.note(sequence, 50 + RECENT + EVICTION_STRIDE - 1)
    assert not eviction.evict()
    eviction.note(sequence, 50 + RECENT + EVICTION_STRIDE)
    assert eviction.evict()
    assert allocator.freed == REQ_TO_TOKEN[1, 50 : 50 + EVICTION_STRIDE].tolist()


@pytest.mark.parametrize("change", ["ended", "orphaned", "protected"])
def test_nothing_of_a_request_that_left_meanwhile_is_freed(
    eviction: Eviction, allocator: Allocator, change: str
) -> None:
    sequence = sequence_of(row=1)
    eviction.note(sequence, 200)
    if change == "protected":
        sequence.request.cache_protected_len = 200
    else:
        setattr(sequence, change, True)
    before = sequence.request.cache_protected_len
    assert not eviction.evict()
    assert allocator.freed == []
    assert sequence.request.cache_protected_len == before


@pytest.mark.parametrize("dense_layers", [1, 2])
def test_dense_layers_find_every_token_where_the_table_says(
    allocator: Allocator, dense_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the pool rows that are freed, and of other layers."""
    layers, slots, context, block_rows = 3, 4, 500, 7
    first_block = slots * context
    rows = first_block + 2 * block_rows
    table = torch.arange(slots * context, dtype=torch.int32).view(slots, context)
    keys, values = (
        [
            torch.randn((rows + (layer < dense_layers) * 2 * context, 2, 8))
            for layer in range(layers)
        ]
        for _ in range(2)
    )
    tokens = {
        row: [buffer[table[row].long()] for buffer in (*keys, *values)] for row in range(slots)
    }
    in_sparse_layers = [buffer.clone() for buffer in (*keys[dense_layers:], *values[dense_layers:])]
    model = SimpleNamespace(context_len=context)
    monkeypatch.setattr("sglang_ext.memory.model_config", lambda args: model)
    eviction = Eviction(args_of(dense_layers), Pools(table, keys, values, allocator))
    sequences = [sequence_of(row=row) for row in (1, 3)]
    for block, sequence in enumerate(sequences):
        sequence.block = first_block + block * block_rows
    for position in range(PROMPT_IN_POOL, context):
        for sequence in sequences:
            eviction.note(sequence, position)
        eviction.evict()
        freed = torch.tensor(allocator.freed, dtype=torch.int64)
        for buffer in (*keys[:dense_layers], *values[:dense_layers]):
            buffer[freed] = float("nan")  # another request has them
    assert (
        len(set(allocator.freed)) == len(allocator.freed) > 2 * (context - RECENT - EVICTION_STRIDE)
    )
    for row in range(slots):
        for buffer, wanted in zip((*keys, *values), tokens[row], strict=True):
            if buffer.shape[0] > rows:
                assert torch.equal(buffer[table[row].long()], wanted)
    for buffer, wanted in zip(
        (*keys[dense_layers:], *values[dense_layers:]), in_sparse_layers, strict=True
    ):
        assert torch.equal(buffer, wanted)
