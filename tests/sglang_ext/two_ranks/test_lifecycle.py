"""Sequences: when they begin, how they move on, why they do not begin, and what they give back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_requests import fake_request
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_rank.config import CacheRankConfig, ModelShape
from sglang_ext.request_state import prepare_requests
from sglang_ext.two_ranks.lifecycle import MOST_LOSSES, Lifecycle, Phase, SparseSequence
from sglang_ext.two_ranks.working_set import Reserve

THRESHOLD = 12
CONTEXT = 200
CONFIG = CacheRankConfig(
    ModelShape(2, 2, 1, 8, "float32", 1.0),
    sparse_budget=8,
    sink_tokens=2,
    recent_tokens=3,
    query_window=3,
    max_swap_tokens=3,
)


def lifecycle_with(
    config: CacheRankConfig = CONFIG, blocks: int = 4, capacity: int = 10_000
) -> tuple[Lifecycle, Reserve]:
    """All sequences of one inference rank, connected to a cache rank with this much memory."""
    reserve = Reserve(500, config.sink_tokens + config.sparse_budget, blocks)
    lifecycle = Lifecycle(config, reserve, THRESHOLD, CONTEXT)
    lifecycle.capacity_tokens = capacity
    return lifecycle, reserve


def request_on(
    slot: int, prompt: int = 20, new_tokens: int | None = 10, custom: dict[str, Any] | None = None
) -> Any:
    """A request as SGLang's scheduler holds it."""
    request = fake_request(
        req_pool_idx=slot,
        origin_input_ids=[0] * prompt,
        sampling_params=SimpleNamespace(custom_params=custom, max_new_tokens=new_tokens),
    )
    prepare_requests([request])
    return request


# Reasons to stay dense.


@pytest.mark.parametrize(
    ("custom", "reason"),
    [
        (None, None),
        ({"cache_rank": True}, None),
        ({"cache_rank": None}, None),
        ({"cache_rank": False}, "asked"),
        ("cache_rank", None),
        ([{"cache_rank": False}], None),
    ],
)
def test_a_request_stays_dense_when_it_asks_to(
    custom: dict[str, Any] | None, reason: str | None
) -> None:
    lifecycle, _ = lifecycle_with()
    request = request_on(1, custom=custom)
    assert lifecycle.reason_to_stay_dense(request, THRESHOLD, is_up=True) == reason


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "needed"),
    [
        (20, 10, 31),
        (20, None, 21),
        (20, 1_000_000, CONTEXT + 1),
        (CONTEXT - 1, 1, CONTEXT + 1),
    ],
)
def test_a_sequence_needs_room_for_the_whole_request_and_one_step_more(
    prompt: int, new_tokens: int | None, needed: int
) -> None:
    request = request_on(1, prompt, new_tokens)
    lifecycle, _ = lifecycle_with(capacity=needed - 1)
    assert lifecycle.reason_to_stay_dense(request, THRESHOLD, is_up=True) == "cache_rank_memory"
    lifecycle.capacity_tokens = needed
    assert lifecycle.reason_to_stay_dense(request, THRESHOLD, is_up=True) is None


@pytest.mark.parametrize("is_up", [True, False])
def test_a_request_says_the_same_of_itself_whatever_the_cache_rank_does(is_up: bool) -> None:
    """With no memory and no block left either."""
    lifecycle, _ = lifecycle_with(blocks=0, capacity=0)

    def reason(request: Any, length: int = THRESHOLD) -> str | None:
        return lifecycle.reason_to_stay_dense(request, length, is_up)

    request = request_on(1)
    assert reason(request, THRESHOLD - 1) == "below_threshold"
    assert reason(request) == ("max_sparse_requests" if is_up else "down")
    request.cache_rank_losses = MOST_LOSSES
    assert reason(request) == "cache_rank_losses"
    assert reason(request_on(1, custom={"cache_rank": False})) == "asked"


# Phases.


def take_step(
    lifecycle: Lifecycle,
    sequence: SparseSequence,
    position: int,
    chunk: int,
    config: CacheRankConfig = CONFIG,
) -> Phase:
    """One decode step of one request, as the inference rank runs it; the phase it ran in."""
    turned = lifecycle.move_on(sequence, position)
    phase = sequence.phase
    assert turned <= (phase is Phase.SPARSE)
    if phase is Phase.SHIPPING:
        sequence.shipped = min(position + 1, sequence.shipped + chunk)
    else:
        sequence.exchanged += 1
        sequence.filled = config.filled_after(position, sequence.filled)
    return phase


def expected_phases(config: CacheRankConfig, positions: range, chunk: int) -> list[Phase]:
    """Phases by position, from first principles."""
    phases = []
    shipped = slots = exchanged = 0
    sparse = False
    for position in positions:
        if exchanged == 0 and shipped < position:
            phases.append(Phase.SHIPPING)
            shipped = min(position + 1, shipped + chunk)
            continue
        # Predecessors that are neither sinks nor recent: each of them has a slot, or all slots do.
        old = max(0, position - config.sink_tokens - config.recent_tokens)
        full = slots == min(config.sparse_budget, old)
        sparse = sparse or (exchanged > config.query_window and full)
        phases.append(Phase.SPARSE if sparse else Phase.WARMING)
        exchanged += 1
        older = max(0, position + 1 - config.sink_tokens - config.recent_tokens)
        slots = min(config.sparse_budget, older, slots + config.max_swap_tokens)
    return phases


decodings = st.builds(
    lambda first, steps: range(first, first + steps),
    st.integers(THRESHOLD - 1, 40),
    st.integers(1, 60),
)
"""The positions of a request from its first decode step beyond the threshold on."""

policies = st.builds(
    lambda **policy: CacheRankConfig(CONFIG.model, **policy),
    sparse_budget=st.integers(1, 20),
    sink_tokens=st.integers(0, 4),
    recent_tokens=st.integers(0, 6),
    query_window=st.integers(1, 6),
    max_swap_tokens=st.integers(1, 7),
)
chunks = st.integers(2, 64)


@settings(deadline=None)
@given(policies, st.lists(decodings, min_size=1, max_size=4), chunks, st.data())
def test_phases_depend_on_the_requests_own_positions_alone(
    config: CacheRankConfig, decodings: list[range], chunk: int, data: st.DataObject
) -> None:
    """Whoever its batch mates are, and in whichever order steps come."""
    lifecycle, _ = lifecycle_with(config)
    left = {slot: list(positions) for slot, positions in enumerate(decodings)}
    seen: dict[int, list[Phase]] = {slot: [] for slot in left}
    while any(left.values()):
        unfinished = [slot for slot, positions in left.items() if positions]
        slot = data.draw(st.sampled_from(unfinished))
        sequence = lifecycle.live.get(slot) or lifecycle.begin(request_on(slot))
        for _ in range(data.draw(st.integers(1, len(left[slot])))):
            position = left[slot].pop(0)
            seen[slot].append(take_step(lifecycle, sequence, position, chunk, config))
        if not left[slot]:
            lifecycle.end(slot)
    for slot, positions in enumerate(decodings):
        assert seen[slot] == expected_phases(config, positions, chunk)


# Ends.


def test_the_end_of_a_sequence_is_told_once() -> None:
    lifecycle, reserve = lifecycle_with()
    sequence = lifecycle.begin(request_on(7))
    assert not sequence.ended
    assert lifecycle.end(3) is None
    assert lifecycle.end(7) is sequence
    assert sequence.ended
    assert lifecycle.end(7) is None
    assert reserve.free_blocks == 4


def test_a_request_that_comes_back_has_a_new_sequence_and_its_old_statistics() -> None:
    lifecycle, _ = lifecycle_with()
    request = request_on(1)
    first = lifecycle.begin(request)
    first.statistics.sparse_steps = 5
    first.shipped = first.exchanged = first.filled = 9
    first.phase = Phase.SPARSE
    lifecycle.end(1)
    request.req_pool_idx = 2
    second = lifecycle.begin(request)
    assert second.sequence_id > first.sequence_id
    assert second.row == 2
    assert (second.phase, second.ended, second.orphaned) == (Phase.SHIPPING, False, False)
    assert (second.shipped, second.exchanged, second.filled) == (0, 0, 0)
    assert second.statistics is first.statistics is request.cache_rank_statistics
