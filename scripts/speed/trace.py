"""Reduces the trace of a cache rank and its inference rank to what a table can hold."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.speed.records import TraceTimes, Wire, quantile

MANAGEMENT = ("append", "predict", "score", "select", "gather")
"""In these events the cache rank works, as opposed to waiting for messages."""


def trace_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace, one a line; whoever wrote the last one may have been stopped."""
    for line in path.read_text(errors="replace").splitlines()[1:]:  # the first opens the array
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line.rstrip(","))


def reduce_trace(path: Path, wire: Wire | None) -> TraceTimes | None:
    """Reduce a trace to the steps of a measurement; None when it has none of them."""
    if not path.is_file():
        return None
    steps: set[int] = set()
    durations: dict[str, list[float]] = defaultdict(list)
    management: dict[int, float] = defaultdict(float)
    waits: dict[int, float] = defaultdict(float)
    begins: dict[int, float] = {}
    for event in trace_events(path):
        step, name = event["args"]["step"], event["name"]
        if wire and not wire.first_step <= step <= wire.last_step:
            continue
        steps.add(step)
        # All layers are alike.
        kind = f"{event['cat']} {'layer' if name.startswith('layer ') else name}"
        durations[kind].append(event["dur"])
        if kind == "inference wait":
            waits[step] += event["dur"]
        elif kind == "inference group":
            begins[step] = min(begins.get(step, event["ts"]), event["ts"])
        elif event["cat"] == "cache" and name in MANAGEMENT:
            management[step] += event["dur"]
    if not steps:
        return None
    spans = {step: begins[step + 1] - begins[step] for step in begins if step + 1 in begins}
    shares = [waits[step] / span for step, span in spans.items()]
    return TraceTimes(
        steps=len(steps),
        median_us={kind: statistics.median(durations[kind]) for kind in sorted(durations)},
        step_ms=statistics.median(spans.values()) / 1e3 if spans else None,
        management_ms=statistics.median(management.values()) / 1e3 if management else None,
        wait_share_p50=quantile(shares, 0.5) if shares else None,
        wait_share_p99=quantile(shares, 0.99) if shares else None,
    )
