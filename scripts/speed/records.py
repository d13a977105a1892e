"""What `profile_tpot` records, and the arithmetic on it; nothing here needs an engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy

from scripts.speed import serving
from scripts.speed.jobs import Shape

WINDOW, WINDOWS = 64, 3
STEPS = WINDOW * WINDOWS
"""Decode steps that are measured of a shape, in windows of consecutive ones."""


class Measurement(serving.Measurement, kw_only=True):
    """One system at one shape."""

    shape: Shape
    medians: list[float] = msgspec.field(
        default_factory=list
    )  # milliseconds of a step, one entry a window
    tpot_ms: float | None = None  # median over the windows of their medians
    mean_ms: float | None = None  # mean over all measured steps
    p10_ms: float | None = None
    p90_ms: float | None = None
    prefill_seconds: float | None = None  # time until all requests have a token
    attended_tokens: float | None = None  # of a request and KV head in a step, with a cache rank
    sparse_steps: int | None = None  # steps over a working set, of the request with fewest
    exchange: dict[str, float] = msgspec.field(default_factory=dict)  # what a cache rank did


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return float(numpy.quantile(values, share, method="inverted_cdf"))


def step_times(
    tokens: Sequence[int], times: Sequence[float], first: int, steps: int
) -> list[float]:
    """Seconds between consecutive tokens of one stream.

    Args:
        tokens: so far, at each of `times`; tokens that came together share their time.
        times: when they came.
        first: token whose arrival starts the first step.
        steps: how many.

    Raises:
        ValueError: the stream does not cover them.
    """
    return numpy.diff(numpy.interp(range(first, first + steps + 1), tokens, times)).tolist()


def summarize(measurement: Measurement, seconds: Sequence[float]) -> None:
    """Fill in a measurement from the seconds of its steps."""
    milliseconds = [1e3 * value for value in seconds]
    measurement.medians = numpy.median(numpy.reshape(milliseconds, (WINDOWS, -1)), axis=1).tolist()
    measurement.tpot_ms = statistics.median(measurement.medians)
    measurement.mean_ms = statistics.fmean(milliseconds)
    measurement.p10_ms = quantile(milliseconds, 0.1)
    measurement.p90_ms = quantile(milliseconds, 0.9)


def exchange_between(
    start: dict[str, Any], before: dict[str, Any], after: dict[str, Any]
) -> dict[str, float]:
    """What the exchange did between two states of the inference rank; nothing without a cache rank.

    `start` is the state when the shape began.
    """

    def grown(name: str, since: dict[str, Any] = before) -> float:
        return float(after.get(name, 0)) - float(since.get(name, 0))

    if not after:
        return {}
    steps = max(1.0, grown("steps"))
    return {
        "late steps %": 100 * grown("steps_waited") / steps,
        "wait ms": 1e3 * grown("wait_seconds") / steps,
        "up MB/step": 1e-6 * grown("up_bytes") / steps,
        "down MB/step": 1e-6 * grown("down_bytes") / steps,
        "bulk GB": 1e-9 * grown("bulk_bytes", start),
    }
