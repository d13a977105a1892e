"""Distributions are compared as their definitions say."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripts.language.report import compare
from scripts.shared.statistics import quantile


def distributions(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(3 * torch.randn((2, 5, 40), generator=generator), dim=-1)


@given(st.integers(0, 1000))
def test_it_follows_the_definitions(seed: int) -> None:
    p, q = distributions(seed)
    text = [3, 0, 39, 7, 7]
    found = compare(p, q, text)
    kl, total_variation, nll, agreement = [], [], [], []
    for own, dense, system in zip(text, p.double().numpy(), q.double().numpy(), strict=True):
        kl.append(sum(np.exp(a) * (a - b) for a, b in zip(dense, system, strict=True)))
        total_variation.append(np.abs(np.exp(dense) - np.exp(system)).sum() / 2)
        nll.append(dense[own] - system[own])
        agreement.append(dense.argmax() == system.argmax())
    assert found.kl == pytest.approx(np.mean(kl), rel=1e-5)
    assert found.ratio_mean == pytest.approx(1 - np.mean(total_variation), abs=1e-6)
    assert found.nll_difference == pytest.approx(np.mean(nll), rel=1e-5)
    assert found.largest_difference == pytest.approx(np.abs(nll).max(), rel=1e-5)
    assert found.top1_agreement == pytest.approx(np.mean(agreement))


def test_equal_distributions_do_not_differ() -> None:
    p, _ = distributions(0)
    found = msgspec.structs.astuple(compare(p, p, [0] * len(p)))
    assert found == (0, 0, 1, pytest.approx(1), 1, 0)


def test_a_weighted_quantile() -> None:
    values, weights = [3.0, 1.0, 2.0], [0.5, 0.2, 0.3]
    found = [quantile(values, share, weights) for share in (0.1, 0.2, 0.4, 0.9, 1)]
    assert found == [1, 1, 2, 3, 3]
