"""The working-set table and its reserve, against a model that writes every row out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_rank.config import CacheRankConfig, ModelShape
from sglang_ext.two_ranks.working_set import Reserve, WorkingSetTable

SLOTS = 4
CONTEXT = 40
FIRST_RESERVE_ROW = 1000


def advance(
    table: WorkingSetTable, rows: list[int], positions: list[int], sparse: list[bool]
) -> None:
    """Both halves: what the host decides, and what the device does."""
    moves = [
        table.places_of_current_token(*row) for row in zip(rows, positions, sparse, strict=True)
    ]
    table.add(*torch.tensor(moves).unbind(1))


def small_config(**changes: Any) -> CacheRankConfig:
    """A policy under which rings wrap and slots fill within a few steps."""
    model = ModelShape(2, 2, 1, 8, "float32", 1.0)
    policy = {
        "sparse_budget": 5,
        "sink_tokens": 2,
        "recent_tokens": 3,
        "max_swap_tokens": 2,
    }
    return CacheRankConfig(model, **{**policy, **changes})


class ModelledRequest:
    """What a request attends to, written out.

    Attributes:
        true_rows: pool row of each of its tokens.
        block: first row of its reserve block, or None while it is dense.
        filled: slots in use.
    """

    def __init__(self, true_rows: list[int]) -> None:
        self.true_rows = true_rows
        self.block: int | None = None
        self.filled = 0

    @property
    def position(self) -> int:
        return len(self.true_rows) - 1

    def attended(self, config: CacheRankConfig) -> list[int]:
        if self.block is None:
            return list(self.true_rows)
        sinks = [self.block + token for token in range(config.sink_tokens)]
        slots = [self.block + config.sink_tokens + slot for slot in range(self.filled)]
        return sinks + slots + self.true_rows[-(config.recent_tokens + 1) :]


class TableTrace(RuleBasedStateMachine):
    """Requests come, decode in batches of any make-up, turn sparse or dense, and go."""

    config = small_config()
    blocks = 2

    def __init__(self) -> None:
        super().__init__()
        config = self.config
        self.true = torch.zeros((SLOTS, CONTEXT), dtype=torch.int32)
        self.table = WorkingSetTable(self.true, config)
        block_rows = config.sink_tokens + config.sparse_budget
        self.reserve = Reserve(FIRST_RESERVE_ROW, block_rows, self.blocks)
        self.requests: dict[int, ModelledRequest] = {}
        self.next_pool_row = 1

    def new_token(self, slot: int) -> int:
        """SGLang writes the pool row of a request's next token; no pool row is used twice."""
        request = self.requests[slot]
        pool_row, self.next_pool_row = self.next_pool_row, self.next_pool_row + 1
        self.true[slot, len(request.true_rows)] = pool_row
        request.true_rows.append(pool_row)
        return pool_row

    @rule(slot=st.integers(0, SLOTS - 1), prompt=st.integers(1, 12))
    def a_new_request_takes_a_slot(self, slot: int, prompt: int) -> None:
        if slot not in self.requests:
            self.requests[slot] = ModelledRequest([])
            for _ in range(prompt):
                self.new_token(slot)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def a_batch_decodes(self, data: st.DataObject, steps: int) -> None:
        living = sorted(self.requests)
        batch = data.draw(st.permutations(living)).copy()
        del batch[data.draw(st.integers(1, len(living))) :]
        turning = data.draw(st.sets(st.sampled_from(batch)))
        for _ in range(steps):
            batch = [slot for slot in batch if len(self.requests[slot].true_rows) < CONTEXT]
            for slot in batch:
                self.new_token(slot)
                if slot in turning:
                    self.turn_sparse(slot)
            if batch:
                self.step(batch)

    def turn_sparse(self, slot: int) -> None:
        request, config = self.requests[slot], self.config
        early = request.position < config.sink_tokens + config.recent_tokens
        if request.block is not None or early or not self.reserve.free_blocks:
            return
        request.block = self.reserve.take()
        request.filled = 0
        self.table.enter(slot, request.position, request.block)

    def step(self, batch: list[int]) -> None:
        requests = [self.requests[slot] for slot in batch]
        positions = [request.position for request in requests]
        advance(self.table, batch, positions, [request.block is not None for request in requests])
        for slot, request in zip(batch, requests, strict=True):
            self.check(slot, request)
            wanted = min(self.config.sparse_budget, request.filled + self.config.max_swap_tokens)
            if request.block is not None:
                request.filled = wanted

    def check(self, slot: int, request: ModelledRequest) -> None:
        expected = request.attended(self.config)
        if request.block is None:
            assert self.table.table[slot, : len(expected)].tolist() == expected
            return
        length = self.table.sparse_length(request.filled)
        attended = self.table.table[slot, :length].tolist()
        assert len(set(attended)) == len(attended)
        assert sorted(attended) == sorted(expected)
        sinks = self.config.sink_tokens
        assert attended[:sinks] == expected[:sinks]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.requests)))
        self.give_back(self.requests.pop(slot))
        self.table.forget(slot)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_request_is_dense_again(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.requests)))
        self.give_back(self.requests[slot])
        self.table.forget(slot)

    def give_back(self, request: ModelledRequest) -> None:
        if request.block is not None:
            self.reserve.give_back(request.block)
            request.block = None

    @invariant()
    def every_block_is_free_or_one_requests(self) -> None:
        blocks = [request.block for request in self.requests.values() if request.block is not None]
        assert len(set(blocks)) == len(blocks)
        assert self.reserve.free_blocks == self.blocks - len(blocks)


class TraceWithoutSinksOrRing(TableTrace):
    """Nothing but the current token is attended to beside the slots."""

    config = small_config(sink_tokens=0, recent_tokens=0)


class TraceWithBudgetBeyondContext(TableTrace):
    """The table is wider than SGLang's own."""

    config = small_config(sparse_budget=CONTEXT + 7, max_swap_tokens=9)


MACHINES = [TableTrace, TraceWithoutSinksOrRing, TraceWithBudgetBeyondContext]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_rows_attended_to_are_those_of_a_naive_model(machine: type[TableTrace]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )


def test_a_forgotten_row_shows_nothing_of_its_former_request() -> None:
    true = torch.arange(2 * CONTEXT, dtype=torch.int32).view(2, CONTEXT)
    table = WorkingSetTable(true, small_config())
    advance(table, [1], [7], [False])
    table.forget(1)
    true[1] += 500
    advance(table, [1], [8], [False])  # the very position that the former request would be at
    assert table.table[1, :9].tolist() == true[1, :9].tolist()
