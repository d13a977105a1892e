"""Which decode steps `--trace` covers, and when their spans are written."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from cache_rank.measure.timeline import Span
from sglang_ext.two_ranks.tracing import WARM_UP_STEPS, Tracer

ENOUGH = WARM_UP_STEPS + 60


def run(tracer: Tracer, sparse: list[int]) -> tuple[list[int], list[int]]:
    """Steps with so many sparse requests: which are traced, and after which spans are read."""
    exchange = Mock()
    traced, written = [], []
    for step, requests in enumerate(sparse):
        if tracer.wants(requests):
            traced.append(step)
        exchange.spans.reset_mock()
        exchange.spans.return_value = [Span("wait", 0, 1, step, 0)]
        tracer.write_when_done(exchange)
        if exchange.spans.called:
            written.append(step)
    return traced, written


@pytest.mark.parametrize("steps", [1, 8, 20])
def test_consecutive_steps_are_traced_once_after_some_to_warm_up(
    steps: int, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    traced, written = run(Tracer(str(path), steps), [1] * ENOUGH)
    assert traced == list(range(WARM_UP_STEPS, WARM_UP_STEPS + steps))
    assert len(written) == 1
    assert traced[-1] < written[0]
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert [event["args"]["step"] for event in events] == written
    assert {event["pid"] for event in events} == {"inference rank"}


def test_a_server_that_stays_dense_traces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    assert run(Tracer(str(path), 4), [0] * ENOUGH) == ([], [])
    assert path.read_text() == "[\n"
