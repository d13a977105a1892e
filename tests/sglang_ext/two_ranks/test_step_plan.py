"""What requests do in a step, and what of it goes to the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_requests import fake_request
from test_working_set import small_config

from cache_rank.budget import BudgetCurve
from sglang_ext.memory import reserve_rows
from sglang_ext.payoff import Payoff, StepTime
from sglang_ext.pools import Pools
from sglang_ext.request_state import RequestStatistics
from sglang_ext.two_ranks.exchange.pinned_ring import RING_ENTRIES
from sglang_ext.two_ranks.lifecycle import Phase, SparseSequence
from sglang_ext.two_ranks.step_plan import GRAPH_PADDING, StepPlanner

CONFIG = small_config(query_window=2)
SLOTS, CONTEXT = 6, 64
ARGS: Any = SimpleNamespace(
    dense_layers=0,
    sparse_from=12,
    sparse_anyway_from=12,
    sink_tokens=CONFIG.sink_tokens,
    budget_curve=BudgetCurve.flat(CONFIG.sparse_budget),
    disable_radix_cache=True,
    inference_kv="full",
    max_sparse_requests=2,
)
FIRST_BLOCK = SLOTS * CONTEXT


def planner_of(
    by_kernels: bool = False, device: str = "cpu", inference_kv: str = "full", **changes: Any
) -> StepPlanner:
    """A planner whose pool holds the tokens of every request slot in a row."""
    config = small_config(query_window=2, **changes)
    generator = torch.Generator().manual_seed(0)
    rows = FIRST_BLOCK + reserve_rows(ARGS)
    keys, values = (
        [torch.randn((rows, 1, 8), generator=generator).to(device) for _ in range(2)]
        for _ in range(2)
    )
    true = torch.arange(FIRST_BLOCK, dtype=torch.int32, device=device).view(SLOTS, CONTEXT)
    args: Any = SimpleNamespace(**{**vars(ARGS), "inference_kv": inference_kv})
    planner = StepPlanner(args, config, Pools(true, keys, values, None), Mock(), by_kernels)
    planner.lifecycle.capacity_tokens = 1000
    return planner


def request_on(slot: int, custom_params: dict[str, Any] | None = None) -> Any:
    params = SimpleNamespace(custom_params=custom_params, max_new_tokens=20)
    return fake_request(req_pool_idx=slot, origin_input_ids=[0] * 12, sampling_params=params)


@pytest.mark.parametrize("sinks", [0, 1, 2])
def test_sinks_are_copied_into_the_block_and_nowhere_else(sinks: int) -> None:
    planner = planner_of(sink_tokens=sinks)
    buffers = [*planner.slots.keys.tensors, *planner.slots.values.tensors]
    before = [buffer.clone() for buffer in buffers]
    planner._copy_sinks(SparseSequence(1, None, 3, FIRST_BLOCK + 2, 0, RequestStatistics()))
    for buffer, old in zip(buffers, before, strict=True):
        expected = old.clone()
        for token in range(sinks):
            expected[FIRST_BLOCK + 2 + token] = old[3 * CONTEXT + token]
        assert torch.equal(buffer, expected)


def test_a_request_goes_from_shipping_over_warming_to_its_working_set() -> None:
    planner, request, short = planner_of(), request_on(4), request_on(2)
    phases = []
    for step in range(8):
        length = 14 + step
        plan = planner.plan([short, request], [3 + step, length], True)
        assert plan.step == step  # the first only ships, and is no step of the exchange
        planner.publish(plan, step)
        (sequence,) = planner.lifecycle.live.values()
        phases.append(sequence.phase)
        dense = [3 + step, length]
        if sequence.phase is Phase.SHIPPING:
            assert plan.shipping == [(sequence, length)]
            assert not plan.rows
            sequence.shipped = length
            assert plan.attended_lengths == dense
            continue
        assert plan.shipping == []
        ((of_row, batch_index, position, *found),) = plan.rows
        assert (of_row, batch_index, position) == (sequence, 1, length - 1)
        settled = sequence.phase is Phase.SPARSE and sequence.filled == CONFIG.sparse_budget
        filled = tuple(found)
        assert filled[0] == CONFIG.filled_after(length - 1, sequence.filled)
        if settled:
            assert filled == (CONFIG.sparse_budget, CONFIG.sparse_budget)
        else:
            assert filled[1] == CONFIG.filled_after(length - 2, sequence.fresh_filled)
        if sequence.phase is Phase.SPARSE:
            assert filled[1] == sequence.filled, "all groups have what the step attends to"
        if sequence.phase is Phase.SPARSE:
            assert plan.sparse == [sequence]
            dense[1] = planner.table.sparse_length(sequence.filled)
        else:
            assert plan.sparse == []
        assert plan.attended_lengths == dense
        sequence.filled, sequence.fresh_filled = filled
        sequence.exchanged += 1
    assert phases == [Phase.SHIPPING, *[Phase.WARMING] * 3, *[Phase.SPARSE] * 4]


@pytest.mark.parametrize(("by_kernels", "where"), [(False, "cpu"), (True, "cpu"), (True, "cuda")])
def test_the_table_has_the_current_tokens_before_the_step(
    by_kernels: bool, where: str, device: torch.device
) -> None:
    if where != device.type and where != "cpu":
        pytest.skip("needs a GPU")
    planner = planner_of(by_kernels, where)
    true = torch.arange(FIRST_BLOCK).view(SLOTS, CONTEXT)
    for step in range(2 * RING_ENTRIES):
        requests, lengths = [request_on(5), request_on(1)], [9 + step % 40, 4 + step % 40]
        if step % 3 == 1:  # a batch that is smaller than the one before
            requests, lengths = requests[:1], lengths[:1]
        plan = planner.plan(requests, lengths, False)
        planner.publish(plan, 7)
        for request, length in zip(requests, lengths, strict=True):
            slot = request.req_pool_idx
            assert planner.table.table[slot, :length].tolist() == true[slot, :length].tolist()
    others = [slot for slot in range(SLOTS) if slot not in (1, 5)]
    assert not planner.table.table[others].any()


def test_a_step_brings_its_numbers_to_the_device() -> None:
    """A captured graph reads rows beyond those of the batch, and is captured before any step."""
    planner = planner_of(by_kernels=True)
    numbers = planner.numbers
    assert numbers is not None
    assert set(numbers["lengths"].tolist()) == {1}
    assert set(numbers["exchanged"].tolist()) == {-1}
    requests = [request_on(5), request_on(1)]
    planner.plan(requests, [9, 13], True)
    planner.lifecycle.live[1].shipped = 13
    plan = planner.plan(requests, [10, 14], True)
    planner.publish(plan, 7)
    padding = GRAPH_PADDING + SLOTS - 2
    assert plan.lengths is not None
    assert plan.lengths.tolist() == [10, 14] + [1] * padding
    assert numbers["steps"].tolist() == [7, 1]
    assert numbers["exchanged"].tolist() == [-1, 0] + [-1] * padding


def test_without_a_cache_rank_no_sequence_begins_and_long_requests_are_counted() -> None:
    planner, metrics = planner_of(), Mock()
    planner._metrics = metrics
    long, short = request_on(1), request_on(2)
    for _ in range(2):
        plan = planner.plan([long, short], [12, 11], False)
        assert planner.lifecycle.live == {}
        assert plan.attended_lengths == [12, 11]
    metrics.series.count_dense.assert_called_once_with(long, "down")
    assert long.cache_rank_statistics.dense_reason == "down"
    assert short.cache_rank_statistics.dense_reason == "below_threshold"


@pytest.mark.parametrize(
    ("lengths", "asks", "sparse"),
    [
        ((30, 11), (), ()),  # 30 tokens less 11 take as long as the exchange
        ((31, 11), (), (0,)),
        ((22, 21), (), (0, 1)),  # together they spare 21
        ((22, 21), (1,), ()),  # the second stays dense anyway
        ((40, 12), (1,), (0,)),
        ((50, 12), (0,), ()),
    ],
)
def test_requests_begin_together_if_their_steps_are_shorter_then(
    lengths: tuple[int, ...], asks: tuple[int, ...], sparse: tuple[int, ...]
) -> None:
    planner = planner_of()
    assert planner.attended(30) == 11
    planner.payoff = Payoff(StepTime(100.0, 1.0), StepTime(119.5, 1.0), 1, 0)
    planner.sparse_anyway_from = 60
    dense = {"cache_rank": False}
    requests = [request_on(slot, dense if slot in asks else None) for slot in range(len(lengths))]
    planner.plan(requests, lengths, True)
    assert tuple(planner.lifecycle.live) == sparse
    for slot, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        reason = request.cache_rank_statistics.dense_reason
        why = "asked" if slot in asks else "shipping" if slot in sparse else "not_shorter"
        assert reason == ("below_threshold" if length < 12 else why)


def test_a_request_joins_those_that_are_sparse_and_begins_anyway_when_it_is_long() -> None:
    planner = planner_of()
    planner.payoff = Payoff(StepTime(100.0, 1.0), StepTime(1000.0, 1.0), 1, 0)
    planner.sparse_anyway_from = 60
    first, second = request_on(1), request_on(2)
    planner.plan([first, second], [59, 12], True)
    assert not planner.lifecycle.live
    planner.plan([first], [60], True)
    planner.plan([first, second], [61, 12], True)
    assert [*planner.lifecycle.live] == [1, 2]


def test_a_prompt_that_comes_makes_no_other_request_sparse() -> None:
    """Its steps are not exchanged yet."""
    planner = planner_of()
    planner.payoff = Payoff(StepTime(100.0, 1.0), StepTime(1000.0, 1.0), 1, 0)
    planner.sparse_anyway_from = 60
    coming, running = request_on(1), request_on(2)
    planner.begin_arriving(coming, 60, [running], True)
    planner.plan([running], [30], True)
    assert [*planner.lifecycle.live] == [1]
    planner.plan([coming, running], [60, 30], True)
    assert [*planner.lifecycle.live] == [1, 2]


@pytest.mark.parametrize(
    ("length", "is_up", "dense", "capacity", "begins"),
    [
        (12, True, 1, 1000, True),
        (11, True, 1, 1000, False),
        (12, False, 1, 1000, False),
        (12, True, 2, 1000, False),  # who may want both blocks
        (12, True, 1, 40, False),  # and has found no memory
    ],
)
def test_a_prompt_that_comes_takes_no_room_that_running_requests_may_want(
    length: int, is_up: bool, dense: int, capacity: int, begins: bool
) -> None:
    planner = planner_of()
    lifecycle, running = planner.lifecycle, [request_on(slot) for slot in range(2, 2 + dense)]
    lifecycle.capacity_tokens = capacity - 10
    planner.plan(running, [11] * dense, True)
    if capacity < 1000:
        planner.plan(running, [12], True)
        assert running[0].cache_rank_statistics.dense_reason == "cache_rank_memory"
    lifecycle.capacity_tokens = capacity
    coming = request_on(1)
    planner.begin_arriving(coming, length, running, is_up)
    assert (1 in lifecycle.live) == begins
    assert planner._metrics.series.count_dense.call_count == (capacity < 1000)


def test_a_request_says_why_its_last_step_was_dense() -> None:
    """Here another has the memory of the cache rank, and then gives it back."""
    planner, other, request = planner_of(), request_on(1), request_on(2)
    planner.lifecycle.capacity_tokens = 40  # of the 33 that each of them needs
    reasons = []
    for step in range(10):
        length = 9 + step
        requests, lengths = [request], [length]
        if step < 5:
            requests, lengths = [other, request], [20 + step, length]
        elif step == 5:
            planner.lifecycle.end(1)
        plan = planner.plan(requests, lengths, is_up=step != 4)
        reasons.append(request.cache_rank_statistics.dense_reason)
        for sequence, length in plan.shipping:
            sequence.shipped = length
        for row in plan.rows:
            row.sequence.exchanged += 1
            row.sequence.filled, row.sequence.fresh_filled = row.filled_after, row.fresh_filled
    assert reasons == [
        *["below_threshold"] * 3,
        *["cache_rank_memory", "down", "shipping"],
        *["warming"] * 3,
        None,
    ]
    # Who comes back in another slot keeps it until its next step.
    planner.lifecycle.end(2)
    request.req_pool_idx = 3
    assert request.cache_rank_statistics.dense_reason is None
    planner.plan([request], [19], False)
    assert request.cache_rank_statistics.dense_reason == "down"


def test_an_orphan_keeps_its_working_set_and_is_not_exchanged() -> None:
    planner, request = planner_of(), request_on(3)
    planner.plan([request], [14], True)
    (sequence,) = planner.lifecycle.live.values()
    sequence.phase, sequence.filled, sequence.orphaned = Phase.SPARSE, 4, True
    for is_up in (False, True):
        plan = planner.plan([request], [15], is_up)
        assert plan.sparse == [sequence]
        assert not plan.rows
        assert plan.attended_lengths == [planner.table.sparse_length(4)]
