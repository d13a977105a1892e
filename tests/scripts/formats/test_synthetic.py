"""Synthetic keys and values."""

from __future__ import annotations

import torch

from scripts.formats.quality import Exact
from scripts.formats.synthetic import OUTLIER_CHANNELS, OUTLIER_MAGNITUDE, synthetic_sample


def test_synthetic_keys_are_a_function_of_the_seed_and_have_outlier_channels() -> None:
    sample, again = (synthetic_sample(2000, 3, 2, 4, 2, 64, seed=7) for _ in range(2))
    other = synthetic_sample(2000, 3, 2, 4, 2, 64, seed=8)
    for one, two, third in zip(sample[:3], again[:3], other[:3], strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, two)
        assert not torch.equal(one, third)
    first = sample.keys[:, :, :20].float().mean(2)  # before the means have moved
    large = first.abs() > OUTLIER_MAGNITUDE / 2
    assert (large.sum(-1) == OUTLIER_CHANNELS).all()
    assert not torch.equal(large[0, 0], large[0, 1])
    moved = (sample.keys[:, :, -20:].float().mean(2) - first)[large].abs()
    assert moved.max() > 1  # the fastest of them
    assert moved.min() < 1  # the slowest
    assert sample.values.float().std() < 2
    values = sample.values.float().mean(2)
    assert values.abs().max() < 1
    # A few tokens have most of the attention.
    scores = Exact.of(sample).scores[-1].exp()
    assert (scores.topk(100).values.sum(-1) > 0.4 * scores.sum(-1)).all()
