"""Means over problems with bootstrap intervals, of one system and of two on the same problems.

The unit is the problem, whose repeats are averaged before: repeats of one problem say little about
others, so that counting them as problems would make an interval too narrow. An interval over
problems holds both the choice of problems and the sampling of answers.

Two systems are compared problem by problem. What makes a problem hard is common to both and leaves
the difference, whose interval is therefore several times narrower than those of the two means.

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

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 0


class Estimate(NamedTuple):
    """A value and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def mean(values: ArrayLike) -> Estimate:
    """The mean over problems of `values`, [problems].

    Raises:
        ValueError: fewer than two problems.
    """
    return _estimate(np.mean, values)


def difference(values: ArrayLike, baseline: ArrayLike) -> Estimate:
    """The mean of `values - baseline`, [problems] each in the same order.

    Raises:
        ValueError: fewer than two problems, or not as many of one as of the other.
    """
    return _estimate(lambda v, b, axis: np.mean(v - b, axis=axis), values, baseline)


def ratio(values: ArrayLike, baseline: ArrayLike) -> Estimate:
    """The mean of `values` over that of `baseline`, which is positive; see `difference`."""
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


def _estimate(statistic: Callable[..., Any], *samples: ArrayLike) -> Estimate:
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    if any(array.ndim != 1 or len(array) < 2 for array in arrays):
        raise ValueError(f"needs two or more problems, got {[array.shape for array in arrays]}")
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"problems are not paired: {[len(array) for array in arrays]}")
    interval = bootstrap(
        arrays,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=100,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    value = statistic(*arrays, axis=0)
    return Estimate(float(value), float(interval.low), float(interval.high))
