"""What the host learns of the times of steps."""

from __future__ import annotations

import torch

from cache_rank.config import CacheRankConfig, ModelShape
from sglang_ext.two_ranks.exchange.device.gate import StepClock

MODEL = ModelShape(4, query_heads=2, kv_heads=1, head_dim=8, dtype="float32", scale=1.0)


def made_clock() -> StepClock:
    return StepClock(CacheRankConfig(MODEL, layers_per_group=2), torch.device("cpu"))


def compute(clock: StepClock, number: int, stamps: list[int]) -> None:
    """A forward pass, as the host sees it later."""
    clock.expect(number)
    clock.stamps.copy_(torch.tensor(stamps))
    clock.report(torch.tensor([number]))


def test_the_wait_of_a_group_is_what_its_first_layer_takes_longer() -> None:
    clock = made_clock()
    compute(clock, 1, [0, 100, 200, 300, 400])
    compute(clock, 2, [1000, 1150, 1250, 1420, 1520])
    first, second = clock.completed(), clock.completed()
    assert first is not None
    assert second is not None
    assert (first.step, second.step) == (1, 2)
    assert clock.waits(first) == [0, 0]
    assert [round(1e9 * wait) for wait in clock.waits(second)] == [50, 70]
    assert clock.completed() is None


def test_steps_before_a_loss_are_none_of_the_next_connection() -> None:
    clock = made_clock()
    compute(clock, 1, [0, 100, 200, 300, 400])
    clock.forget()
    assert clock.completed() is None
    compute(clock, 2, [1000, 1100, 1200, 1300, 1400])
    found = clock.completed()
    assert found is not None
    assert found.step == 2
