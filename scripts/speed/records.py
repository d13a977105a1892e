"""What `profile_tpot` records, and the arithmetic on it; nothing here needs an engine."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy

from scripts.speed.jobs import Job, Settings, Shape

LONGEST_ERROR = 160


class Repeat(msgspec.Struct, frozen=True):
    """Milliseconds per decode step over one window of consecutive steps."""

    median: float
    mean: float
    p10: float
    p90: float


class Wire(msgspec.Struct, frozen=True):
    """What the exchange did between two states of the inference rank."""

    up_bytes: float  # bytes per step, over all requests
    down_bytes: float
    bulk_bytes: float = 0.0  # bytes of all prompts
    tokens_shipped: float = 0.0  # tokens per step, over all requests
    late_share: float = 0.0  # share of the steps that waited for an answer
    wait_ms: float = 0.0  # time waited per step


class Measurement(msgspec.Struct):
    """One system at one shape."""

    system: str
    shape: Shape
    failure: str = ""  # why there are no numbers
    repeats: list[Repeat] = []  # one entry a window
    tpot_ms: float | None = None  # median over the windows of their medians
    mean_ms: float | None = None  # mean over all measured steps
    p10_ms: float | None = None
    p90_ms: float | None = None
    prefill_seconds: float | None = None  # time until all requests have a token
    attended_tokens: float | None = None  # mean of a request and KV head in a step
    sparse_steps: int | None = None  # steps over a working set, of the request with fewest
    late_steps: int | None = None
    wire: Wire | None = None
    memory_gib: list[float] = []  # in use at the end, one entry a GPU

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the whole batch in a second."""
        return 1e3 * self.shape.batch / self.mean_ms if self.mean_ms else None


class Results(msgspec.Struct):
    """Everything one invocation writes, and what it resumed."""

    commands: list[str] = []  # all that wrote it, in order, as one types them
    machine: dict[str, Any] = {}
    settings: Settings | None = None
    jobs: list[Job] = []
    measurements: list[Measurement] = []

    def of(self, job: Job) -> list[Measurement]:
        """The measurements of a job."""
        return [m for m in self.measurements if m.system == job.system]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return float(numpy.quantile(values, share, method="inverted_cdf"))


def step_times(arrivals: Sequence[tuple[int, float]], first: int, steps: int) -> list[float]:
    """Seconds between consecutive tokens of one stream.

    Args:
        arrivals: (tokens so far, when), in order; tokens that came together share their time.
        first: token whose arrival starts the first step.
        steps: how many.

    Raises:
        ValueError: the stream does not cover them.
    """
    times: dict[int, float] = {}
    for (tokens, then), (more, now) in itertools.pairwise(arrivals):
        for token in range(tokens + 1, more + 1):
            times[token] = (now - then) / (more - tokens)
    try:
        return [times[token] for token in range(first + 1, first + steps + 1)]
    except KeyError:
        raise ValueError(f"tokens {first} to {first + steps} were not all seen") from None


def summarize(measurement: Measurement, seconds: Sequence[float], window: int) -> None:
    """Fill in a measurement from the seconds of its steps, whole windows of them."""
    milliseconds = [1e3 * value for value in seconds]
    windows = [milliseconds[i : i + window] for i in range(0, len(milliseconds), window)]
    measurement.repeats = [
        Repeat(statistics.median(w), statistics.fmean(w), quantile(w, 0.1), quantile(w, 0.9))
        for w in windows
    ]
    measurement.tpot_ms = statistics.median(repeat.median for repeat in measurement.repeats)
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


def explain_failure(log: str, was_ready: bool, ran_out_of_time: bool) -> str:
    """One phrase for a server that was not measured, from what it and its client say."""
    if re.search("out of memory|outofmemory|not enough memory", log, re.IGNORECASE):
        return "out of memory"
    if ran_out_of_time:
        return "ran out of time" if was_ready else "did not start in time"
    phrase = "ended while measuring" if was_ready else "did not start"
    errors = re.findall(r"^[\w.]*(?:Error|Exception): .+", log, flags=re.MULTILINE)
    return f"{phrase} ({errors[-1][:LONGEST_ERROR]})" if errors else phrase
