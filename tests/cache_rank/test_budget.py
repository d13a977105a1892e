"""Budgets by length: of one request on the host, and of a batch where its lengths are."""

from __future__ import annotations

import pytest
import torch

from cache_rank.budget import DEFAULT_CURVE, BudgetCurve


def test_a_budget_follows_the_square_root_between_its_bounds() -> None:
    curve = BudgetCurve(6, 192, 1024)
    lengths = (1, 1024, 1025, 2048, 4096, 8192, 29127, 29128, 1 << 20)
    assert [curve.at(length) for length in lengths] == [
        *(192, 192, 192, 271, 384, 543, 1023, 1024, 1024)
    ]


@pytest.mark.parametrize("curve", [DEFAULT_CURVE, BudgetCurve.flat(2048), BudgetCurve.flat(1)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_batch_has_the_budgets_of_its_requests(
    curve: BudgetCurve, index: torch.dtype, device: torch.device
) -> None:
    lengths = torch.arange(1, 40_000, dtype=index, device=device)
    budgets = curve.of(lengths)
    assert budgets.dtype == torch.int32
    assert budgets.tolist() == [curve.at(length) for length in lengths.tolist()]


def test_a_flat_curve_is_the_same_at_every_length() -> None:
    curve = BudgetCurve.flat(40)
    assert {curve.at(length) for length in (1, 1000, 1 << 20)} == {40}
    assert str(curve) == "40"
    assert str(BudgetCurve(6, 192, 1024)) == "6 * sqrt(length), from 192 to 1024"
