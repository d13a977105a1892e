"""The policy both ranks agree on: what it refuses, and the arithmetic that both do."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import GQA, ROTARY_FREQUENCY, small_config

from cache_rank.config import CacheRankConfig

AT_LEAST_ONE = (
    "layers_per_group",
    "sparse_budget",
    "query_window",
    "max_swap_tokens",
    "max_rows",
)
NOT_NEGATIVE = ("sink_tokens", "recent_tokens", "hysteresis")


@pytest.mark.parametrize("name", [*AT_LEAST_ONE, *NOT_NEGATIVE])
def test_refuses_what_is_out_of_range_and_names_it(name: str) -> None:
    least = 1 if name in AT_LEAST_ONE else 0
    assert getattr(small_config(**{name: least}), name) == least
    message = "must not be negative" if name in NOT_NEGATIVE else "must be at least 1"
    with pytest.raises(ValueError, match=f"{name} {message}, got {least - 1}"):
        small_config(**{name: least - 1})


def test_refuses_more_slots_than_selection_holds() -> None:
    assert small_config(max_swap_tokens=16384).max_swap_tokens == 16384
    with pytest.raises(ValueError, match="max_swap_tokens must be at most 16384, got 16385"):
        small_config(max_swap_tokens=16385)
    assert small_config(sparse_budget=16384, hysteresis=16384).sparse_budget == 16384
    with pytest.raises(ValueError, match="sparse_budget must be at most 16384, got 16385"):
        small_config(sparse_budget=16385)
    message = "hysteresis must be at most 16384 beside sparse_budget 16384, got 16385"
    with pytest.raises(ValueError, match=message):
        small_config(sparse_budget=16384, hysteresis=16385)


def test_refuses_heads_of_parts_of_a_scale() -> None:
    with pytest.raises(ValueError, match="wire_dtype int8: 8 channels share a scale"):
        small_config(msgspec.structs.replace(GQA, head_dim=20), wire_dtype="int8")


def test_refuses_shapes_that_no_pool_has() -> None:
    with pytest.raises(ValueError, match="dtype int8 is not one of float32, bfloat16, float16"):
        msgspec.structs.replace(GQA, dtype="int8")
    with pytest.raises(ValueError, match="kv_heads must divide query_heads"):
        msgspec.structs.replace(GQA, query_heads=5)


@pytest.mark.parametrize("name", ["layers", "query_heads", "kv_heads", "head_dim"])
def test_refuses_a_shape_without(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        msgspec.structs.replace(GQA, **{name: 0})


def test_travels_as_msgpack_and_is_checked_again_on_arrival() -> None:
    config = small_config(msgspec.structs.replace(GQA, rotary_frequency=ROTARY_FREQUENCY))
    wire = msgspec.msgpack.encode(config)
    assert msgspec.msgpack.decode(wire, type=CacheRankConfig) == config
    fields = msgspec.msgpack.decode(wire)
    for change in (
        {"sparse_budget": 0},
        {"query_predictor": "median"},
        {"surprise": 1},
    ):
        damaged = msgspec.msgpack.encode({**fields, **change})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(damaged, type=CacheRankConfig)


@given(st.integers(1, 40), st.integers(1, 50))
def test_groups_are_consecutive_and_cover_every_layer_once(layers: int, per_group: int) -> None:
    config = small_config(msgspec.structs.replace(GQA, layers=layers), layers_per_group=per_group)
    groups = config.groups
    assert [layer for group in groups for layer in group] == list(range(layers))
    assert all(len(group) == per_group for group in groups[:-1])
    assert 1 <= len(groups[-1]) <= per_group


policies = st.builds(
    small_config,
    sparse_budget=st.integers(1, 20),
    sink_tokens=st.integers(0, 6),
    recent_tokens=st.integers(0, 10),
    max_swap_tokens=st.integers(1, 8),
)


@given(policies, st.integers(0, 60))
def test_candidates_are_what_the_next_step_does_not_attend_to_anyway(
    config: CacheRankConfig, position: int
) -> None:
    following = position + 1
    predecessors = range(following)
    sinks = predecessors[: config.sink_tokens]
    recent = predecessors[max(0, following - config.recent_tokens) :]
    others = [token for token in predecessors if token not in sinks and token not in recent]
    assert list(config.candidates_after(position)) == others
    assert config.slots_wanted_after(position) == min(config.sparse_budget, len(others))


@given(policies, st.integers(0, 30))
def test_slots_fill_by_the_max_swap_tokens_until_they_are_wanted_no_more(
    config: CacheRankConfig, first_position: int
) -> None:
    filled = 0
    for position in range(first_position, first_position + 60):
        before, filled = filled, config.filled_after(position, filled)
        wanted = config.slots_wanted_after(position)
        assert before <= filled <= min(wanted, before + config.max_swap_tokens)
        assert filled == wanted or filled - before == config.max_swap_tokens
    candidates = len(config.candidates_after(first_position + 59))
    assert filled == min(config.sparse_budget, candidates)
