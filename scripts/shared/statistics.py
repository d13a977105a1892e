"""Means over problems with bootstrap intervals, of one system and of two on the same problems.

The unit is the problem, whose repeats are averaged before: repeats of one problem say little about
others, so that counting them as problems would make an interval too narrow. Two systems are
compared problem by problem: what makes a problem hard is common to both and leaves the difference.

Intervals are percentiles of resampled means (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13) from a fixed seed. Values that are all equal give an interval of no
width: that 64 of 64 problems are right does not exclude an error rate of 3/64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap


class Estimate(NamedTuple):
    """A value and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def mean(values: ArrayLike) -> Estimate:
    """The mean over `values`, [problems]; that of one problem has no width."""
    return _estimate(np.mean, values)


def ratio(values: ArrayLike, baseline: ArrayLike) -> Estimate:
    """The mean of `values` over that of `baseline`, which is positive, [problems] in one order."""
    return _estimate(
        lambda v, b, axis: np.mean(v, axis=axis) / np.mean(b, axis=axis), values, baseline
    )


def interval(
    estimate: Estimate | None, digits: int = 2, scale: float = 1, sign: bool = False
) -> str:
    """An estimate as text: its interval is left out where it is a point; a dash for none."""
    if estimate is None:
        return "–"
    plus = "+" if sign else ""
    value, low, high = (f"{scale * part:{plus}.{digits}f}" for part in estimate)
    return value if low == high == value else f"{value} [{low}, {high}]"


def quantile(values: Any, share: float, weights: Any = None) -> float:
    """The smallest value that `share` of the values, [n], or of their weights, do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf", weights=weights))


def _estimate(statistic: Callable[..., Any], *samples: ArrayLike) -> Estimate:
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    value = float(statistic(*arrays, axis=0))
    if len(arrays[0]) == 1:
        return Estimate(value, value, value)
    found = bootstrap(
        arrays,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=10_000,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))
