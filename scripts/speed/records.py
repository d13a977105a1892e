"""What `profile_tpot` records, and the arithmetic on it; nothing here needs an engine."""

from __future__ import annotations

import itertools
import re
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy

from scripts.speed.jobs import Job, Shape

LONGEST_ERROR = 160


class Repeat(msgspec.Struct, frozen=True):
    """Milliseconds per decode step over one window of consecutive steps."""

    median: float
    mean: float
    p10: float
    p90: float


class Wire(msgspec.Struct, frozen=True):
    """What the exchange did between two states of the inference rank."""

    first_step: int  # numbers of the exchanged steps
    last_step: int
    up_bytes: float  # bytes per step, over all requests
    down_bytes: float
    bulk_bytes: float = 0.0  # bytes of all prompts
    tokens_shipped: float = 0.0  # tokens per step, over all requests
    late_share: float = 0.0  # share of the steps that waited for an answer
    wait_ms: float = 0.0  # time waited per step


class Arrival(msgspec.Struct, frozen=True):
    """Decode steps of a batch while the prompt of one more request is shipped to the cache rank."""

    steps: int  # steps from when the prompt was computed until the request was sparse
    median_ms: float
    longest_ms: float


class TraceTimes(msgspec.Struct, frozen=True):
    """A trace reduced."""

    steps: int  # decode steps in it
    median_us: dict[str, float]  # median of one event, by `rank name`
    step_ms: float | None = None  # median between the starts of consecutive steps
    management_ms: float | None = None  # median per step that the cache rank works on it
    wait_share_p50: float | None = None  # time waited for answers over the step's time
    wait_share_p99: float | None = None


class Measurement(msgspec.Struct):
    """One system at one shape, from when a worker begins it until it is a line of a table."""

    model: str
    system: str
    shape: Shape
    failure: str = ""  # why there are no numbers
    capacity_search: bool = False
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
    arrival: Arrival | None = None
    trace: TraceTimes | None = None
    started: float = 0.0  # Unix time
    ended: float = 0.0  # Unix time; 0 while it is measured
    memory_gib: list[float] = []  # most memory in use meanwhile, one entry a GPU

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the whole batch in a second."""
        return 1e3 * self.shape.batch / self.mean_ms if self.mean_ms else None


class Results(msgspec.Struct):
    """Everything one invocation writes, and what it resumed."""

    experiment: str = ""
    command: list[str] = []  # the last one, in words
    earlier_commands: list[list[str]] = []  # those that it resumed
    machine: dict[str, Any] = {}
    jobs: list[Job] = []
    measurements: list[Measurement] = []

    @property
    def commands(self) -> list[str]:
        """All commands that wrote it, in order, as one types them."""
        commands = [*self.earlier_commands, self.command]
        return list(dict.fromkeys(map(shlex.join, commands)))

    def of(self, job: Job) -> list[Measurement]:
        """The measurements of a job."""
        wanted = (job.model, job.system)
        return [m for m in self.measurements if (m.model, m.system) == wanted]

    def find(self, model: str, system: str, shape: Shape) -> Measurement | None:
        """The measurement with numbers, if there is one."""
        wanted = (model, system, shape)
        measured = (m for m in self.measurements if m.tpot_ms)
        return next((m for m in measured if (m.model, m.system, m.shape) == wanted), None)

    def tpot_ms(self, model: str, system: str, shape: Shape) -> float | None:
        """The median decode step, if it was measured."""
        found = self.find(model, system, shape)
        return found.tpot_ms if found else None


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


def together(parts: Sequence[Measurement], shape: Shape) -> Measurement:
    """What servers measured that shared a batch, as of one system.

    TPOT is the median over the windows of all. The mean step is such that tokens a second are the
    servers' sum.
    """
    first, tpot, rate = parts[0], None, 0.0
    failures = [part.failure for part in parts if part.failure]
    windows = [repeat for part in parts for repeat in part.repeats]
    if windows and not failures:
        tpot = statistics.median(repeat.median for repeat in windows)
        rate = sum(part.tokens_per_second or 0.0 for part in parts)
    return msgspec.structs.replace(
        first,
        shape=shape,
        failure=failures[0] if failures else "",
        repeats=windows,
        tpot_ms=tpot,
        mean_ms=1e3 * shape.batch / rate if rate else None,
        p10_ms=min((part.p10_ms for part in parts if part.p10_ms), default=None),
        p90_ms=max((part.p90_ms for part in parts if part.p90_ms), default=None),
        prefill_seconds=max((p.prefill_seconds for p in parts if p.prefill_seconds), default=None),
        started=min(part.started for part in parts),
        ended=max(part.ended for part in parts),
        memory_gib=[used for part in parts for used in part.memory_gib],
    )


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
        first_step=int(before.get("steps", 0)) + 1,
        last_step=int(after.get("steps", 0)),
        up_bytes=grown("up_bytes") / steps,
        down_bytes=grown("down_bytes") / steps,
        bulk_bytes=grown("bulk_bytes", start),
        tokens_shipped=grown("tokens_shipped") / steps,
        late_share=grown("steps_waited") / steps,
        wait_ms=1e3 * grown("wait_seconds") / steps,
    )


def explain_failure(log: str, was_ready: bool, ran_out_of_time: bool) -> str:
    """One phrase for a worker that ended without a measurement, from its log."""
    if re.search("out of memory|outofmemory|not enough memory", log, re.IGNORECASE):
        return "out of memory"
    if ran_out_of_time:
        return "ran out of time" if was_ready else "did not start in time"
    phrase = "ended while measuring" if was_ready else "did not start"
    errors = re.findall(r"^[\w.]*(?:Error|Exception): .+", log, flags=re.MULTILINE)
    return f"{phrase} ({errors[-1][:LONGEST_ERROR]})" if errors else phrase
