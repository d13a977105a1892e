"""Timelines: what is written, that viewers can read it, and that two ranks share one file."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

from cache_rank.measure.timeline import Span, Timeline, TraceFile
from cache_rank.schedule import by_history

CPU = torch.device("cpu")


def events_of(path: Path) -> list[dict[str, Any]]:
    """A trace, as Perfetto and Chrome read it: with the closing bracket that may be missing."""
    text = path.read_text()
    assert text.startswith("[\n")
    assert text.endswith("\n")
    events = json.loads(text.rstrip().rstrip(",") + "]")
    assert isinstance(events, list)
    return events


def test_spans_are_complete_events_in_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    file = TraceFile(str(path), "inference")
    file.begin()
    file.write([])
    file.write([Span("wait", 1000.5, 1250.75, step=3, group=1), Span('a "b"\n', 7, 8, 4, 0, "up")])
    # Times of two clocks may be a little apart; viewers refuse negative durations.
    file.write([Span("wait", 5.0, 4.9, 1, 0)])
    wait, other, backward = events_of(path)
    assert wait == {
        "name": "wait",
        "cat": "inference",
        "ph": "X",
        "ts": 1000.5,
        "dur": 250.25,
        "pid": "inference rank",
        "tid": "compute",
        "args": {"step": 3, "group": 1},
    }
    assert (other["name"], other["dur"], other["tid"]) == ('a "b"\n', 1, "up")
    assert backward["dur"] == 0


WRITES, SPANS = 20, 50


def write_many(path: str, rank: str) -> None:
    file = TraceFile(path, rank)
    for step in range(WRITES):
        file.write(Span(f"span of {rank} " + "x" * 200, 0, 1, step, n) for n in range(SPANS))


def test_both_ranks_append_whole_lines_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    TraceFile(str(path), "inference").begin()
    context = multiprocessing.get_context("fork")
    ranks = ("inference", "cache")
    writers = [context.Process(target=write_many, args=(str(path), rank)) for rank in ranks]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    events = events_of(path)
    for rank in ranks:
        own = [event["args"] for event in events if event["pid"] == f"{rank} rank"]
        assert own == [
            {"step": step, "group": group} for step in range(WRITES) for group in range(SPANS)
        ]


# What the cache rank marks.


LAYER_MESSAGES = by_history(groups=2)


def run_step(timeline: Timeline, step: int, traced: bool) -> None:
    timeline.enter_step(step, traced)
    for layer_message in LAYER_MESSAGES:
        timeline.mark(layer_message, "begin")
        time.sleep(0.002)
        timeline.mark(layer_message, "receive")
        timeline.mark(layer_message, "score")
        time.sleep(0.001)
        timeline.mark(layer_message, "select")


def test_traced_steps_are_written_by_the_first_that_is_not(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    TraceFile(str(path), "inference").begin()
    timeline = Timeline(str(path), CPU, LAYER_MESSAGES)
    before = time.monotonic_ns() / 1e3
    run_step(timeline, 1, traced=False)
    run_step(timeline, 2, traced=True)
    run_step(timeline, 3, traced=True)
    assert events_of(path) == []
    after = time.monotonic_ns() / 1e3
    run_step(timeline, 4, traced=False)
    events = events_of(path)
    assert [(event["name"], event["args"]["step"], event["args"]["group"]) for event in events] == [
        (name, step, group)
        for step in (2, 3)
        for group in (0, 1)
        for name in ("receive", "score", "select")
    ]
    assert {event["pid"] for event in events} == {"cache rank"}
    for event in events:
        assert before <= event["ts"] <= event["ts"] + event["dur"] <= after
        if event["name"] == "receive":
            assert event["dur"] >= 2000
        if event["name"] == "select":
            assert event["dur"] >= 1000
    for previous, event in itertools.pairwise(events):
        # Rounding of a sum of floats of 1e12 or so microseconds.
        assert event["ts"] >= previous["ts"] + previous["dur"] - 0.01
    run_step(timeline, 5, traced=False)
    assert events_of(path) == events
    run_step(timeline, 6, traced=True)
    run_step(timeline, 7, traced=False)
    assert {event["args"]["step"] for event in events_of(path)[len(events) :]} == {6}
