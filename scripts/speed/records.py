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


class Wire(msgspec.Struct, frozen=True):
    """What the exchange did between two states of the inference rank."""

    up_bytes: float  # bytes per step, over all requests
    down_bytes: float
    bulk_bytes: float = 0.0  # bytes of all prompts
    tokens_shipped: float = 0.0  # tokens per step, over all requests
    late_share: float = 0.0  # share of the steps that waited for an answer
    wait_ms: float = 0.0  # time waited per step


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
    wire: Wire | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the whole batch in a second."""
        return 1e3 * self.shape.batch / self.mean_ms if self.mean_ms else None


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return float(numpy.quantile(values, share, method="inverted_cdf"))


def step_times(arrivals: Sequence[tuple[int, float]], first: int, steps: int) -> list[float]:
    """Seconds between consecutive tokens of one stream.

    Args:
        arrivals: (tokens so far, when), in order; tokens that came together share their time.
        first: token whose arrival starts the first step.
        steps: how many.
    """
    tokens, times = zip(*arrivals, strict=True)
    return numpy.diff(numpy.interp(range(first, first + steps + 1), tokens, times)).tolist()


def summarize(measurement: Measurement, seconds: Sequence[float]) -> None:
    """Fill in a measurement from the seconds of its steps."""
    milliseconds = [1e3 * value for value in seconds]
    measurement.medians = numpy.median(numpy.reshape(milliseconds, (WINDOWS, -1)), axis=1).tolist()
    measurement.tpot_ms = statistics.median(measurement.medians)
    measurement.mean_ms = statistics.fmean(milliseconds)
    measurement.p10_ms = quantile(milliseconds, 0.1)
    measurement.p90_ms = quantile(milliseconds, 0.9)


def wire_between(
    start: dict[str, Any], before: dict[str, Any], after: dict[str, Any]
) -> Wire | None:
    """What the exchange did in the measured steps.

    Args:
        start, before, after: the inference rank's state when the shape began, and around the steps.
    """
    if not after:
        return None

    def grown(name: str, since: dict[str, Any] = before) -> float:
        return float(after.get(name, 0)) - float(since.get(name, 0))

    steps = max(1.0, grown("steps"))
    return Wire(
        up_bytes=grown("up_bytes") / steps,
        down_bytes=grown("down_bytes") / steps,
        bulk_bytes=grown("bulk_bytes", start),
        tokens_shipped=grown("tokens_shipped") / steps,
        late_share=grown("steps_waited") / steps,
        wait_ms=1e3 * grown("wait_seconds") / steps,
    )
