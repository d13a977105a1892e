"""Bootstrap intervals against what is known of the distributions they are drawn from."""

from __future__ import annotations

import numpy as np

from scripts.shared import statistics


def test_intervals_hold_the_true_mean_nine_times_in_ten() -> None:
    source = np.random.default_rng(0)
    estimates = [statistics.mean(source.normal(2.0, 1.0, size=40)) for _ in range(100)]
    assert 88 <= sum(estimate.low <= 2.0 <= estimate.high for estimate in estimates) <= 99


def test_pairing_takes_out_what_is_common_to_both() -> None:
    source = np.random.default_rng(2)
    difficulty = source.normal(0.0, 10.0, size=60)
    baseline = difficulty + source.normal(size=60)
    values = difficulty + source.normal(size=60) + 1.5
    estimate = statistics.difference(values, baseline)
    assert estimate.low < 1.5 < estimate.high
    assert estimate.low > 0.5
    alone = statistics.mean(values)
    assert alone.high - alone.low > 5 * (estimate.high - estimate.low)
