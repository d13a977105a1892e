"""What `profile_tpot` records, and the arithmetic on it; nothing here needs an engine."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy

from scripts.speed.jobs import Job, Shape

MANAGEMENT = ("append", "predict", "score", "select", "gather")
"""In these events the cache rank works, as opposed to waiting for messages."""

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
    bulk_bytes: float  # bytes of all prompts
    tokens_shipped: float  # tokens per step, over all requests
    late_share: float  # share of the steps that waited for an answer
    wait_ms: float  # time waited per step


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
    """One system at one shape."""

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
    ended: float = 0.0
    memory_gib: list[float] = []  # most memory in use meanwhile, one entry a GPU

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the whole batch in a second."""
        return 1e3 * self.shape.batch / self.mean_ms if self.mean_ms else None

    @property
    def key(self) -> tuple[str, str, Shape]:
        return self.model, self.system, self.shape


class Message(msgspec.Struct):
    """What a worker tells: its engine is `ready`, or a shape's `begin` or `end`."""

    kind: str
    shape: Shape | None = None
    measurement: Measurement | None = None
    machine: dict[str, Any] = {}


class Results(msgspec.Struct):
    """Everything one invocation writes."""

    experiment: str = ""
    command: list[str] = []
    machine: dict[str, Any] = {}
    jobs: list[Job] = []
    measurements: list[Measurement] = []

    def find(self, model: str, system: str, shape: Shape) -> Measurement | None:
        """The measurement with numbers, if there is one."""
        wanted = (model, system, shape)
        return next((m for m in self.measurements if m.key == wanted and m.tpot_ms), None)

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
        int(before.get("steps", 0)) + 1,
        int(after.get("steps", 0)),
        grown("up_bytes") / steps,
        grown("down_bytes") / steps,
        grown("bulk_bytes", start),
        grown("tokens_shipped") / steps,
        grown("steps_waited") / steps,
        1e3 * grown("wait_seconds") / steps,
    )


def trace_events(text: str) -> Iterator[dict[str, Any]]:
    """Events of a Chrome trace: an object or an array, which may break off anywhere."""
    decoder = json.JSONDecoder()
    start = text.find("[")
    if start < 0:
        return
    position = start + 1
    while position < len(text):
        if text[position] in ", \t\r\n":
            position += 1
            continue
        try:
            event, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return
        if isinstance(event, dict):
            yield event


def reduce_trace(path: Path, wire: Wire | None) -> TraceTimes | None:
    """Reduce a trace to the steps of a measurement; None when it has none of them."""
    if not path.is_file():
        return None
    timed = [
        event
        for event in trace_events(path.read_text(errors="replace"))
        if isinstance(event.get("dur"), int | float) and "step" in (event.get("args") or {})
    ]
    if wire is not None:
        timed = [e for e in timed if wire.first_step <= e["args"]["step"] <= wire.last_step]
    if not timed:
        return None

    durations = defaultdict(list)
    management: dict[int, float] = defaultdict(float)
    waits: dict[int, float] = defaultdict(float)
    begins: dict[int, float] = {}
    for event in timed:
        rank, name, step = event.get("cat", ""), event.get("name", ""), int(event["args"]["step"])
        # All layers are alike.
        kind = "layer" if name.startswith("layer ") else name
        durations[f"{rank} {kind}"].append(float(event["dur"]))
        if rank == "cache" and name in MANAGEMENT:
            management[step] += event["dur"]
        elif rank == "inference" and name == "wait":
            waits[step] += event["dur"]
        elif rank == "inference" and name == "group":
            begins[step] = min(begins.get(step, event["ts"]), event["ts"])
    spans = {
        step: begins[step + 1] - begin
        for step, begin in begins.items()
        if begins.get(step + 1, begin) > begin
    }
    shares = [waits.get(step, 0.0) / span for step, span in spans.items()]
    return TraceTimes(
        steps=len({event["args"]["step"] for event in timed}),
        median_us={name: statistics.median(values) for name, values in sorted(durations.items())},
        step_ms=statistics.median(spans.values()) / 1e3 if spans else None,
        management_ms=statistics.median(management.values()) / 1e3 if management else None,
        wait_share_p50=quantile(shares, 0.5) if shares else None,
        wait_share_p99=quantile(shares, 0.99) if shares else None,
    )


def explain_failure(log: str, was_ready: bool, ran_out_of_time: bool) -> str:
    """One phrase for a worker that ended without a measurement, from its log."""
    lowered = log.lower()
    if "out of memory" in lowered or "outofmemory" in lowered or "not enough memory" in lowered:
        return "out of memory"
    if ran_out_of_time:
        return "ran out of time" if was_ready else "did not start in time"
    phrase = "ended while measuring" if was_ready else "did not start"
    errors = re.findall(r"^[\w.]*(?:Error|Exception): .+", log, flags=re.MULTILINE)
    return f"{phrase} ({errors[-1][:LONGEST_ERROR]})" if errors else phrase


def fitting_batch(tokens: int | None, context: int, batches: Sequence[int]) -> list[int]:
    """The batches of `context` tokens that fit in `tokens` together, largest first."""
    if not tokens:
        return []
    return sorted((batch for batch in batches if batch * context <= tokens), reverse=True)
