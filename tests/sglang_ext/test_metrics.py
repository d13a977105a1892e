"""When Prometheus series are exported: each count once, and none left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from cache_rank.protocol import Report
from sglang_ext.metrics import EXPORT_STEPS, CacheRankMetrics
from sglang_ext.two_ranks.restart_backoff import Loss

ARGS: Any = SimpleNamespace(
    decode_log_interval=1000,
    enable_metrics=True,
    served_model_name="model",
    kv_residency="bf16",
)
UP_BYTES = 5
"""A step sends so many."""
LABELS = {"model_name": "model", "tp_rank": "0", "residency": "bf16"}


def exported(series: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang_cache_rank_{series}", {**LABELS, **labels})


class Exchanging:
    """Metrics, and the counters of an exchange with the cache rank."""

    def __init__(self) -> None:
        self.metrics = CacheRankMetrics(ARGS, tp_rank=0)
        self.counters = self.metrics.counters
        self.steps = 0

    def run(self, steps: int, sparse_requests: int = 1) -> None:
        for _ in range(steps):
            self.steps += 1
            self.counters.up_bytes += UP_BYTES
            exchange: Any = SimpleNamespace(waited=0.0, was_late=False)
            self.metrics.on_step(self.steps, exchange, sparse_requests)


@contextlib.contextmanager
def own_series() -> Iterator[None]:
    """A process has one inference rank; series made inside are forgotten."""
    others = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - others:
        REGISTRY.unregister(collector)


@pytest.fixture
def exchanging() -> Iterator[Exchanging]:
    with own_series():
        yield Exchanging()


def test_counters_are_exported_every_so_many_steps(exchanging: Exchanging) -> None:
    exchanging.run(EXPORT_STEPS - 1)
    assert exported("up_bytes_total") == 0
    exchanging.run(1)
    assert exported("up_bytes_total") == EXPORT_STEPS * UP_BYTES
    exchanging.run(EXPORT_STEPS)
    assert exported("up_bytes_total") == 2 * EXPORT_STEPS * UP_BYTES


def test_what_is_left_is_exported_when_no_request_is_sparse(exchanging: Exchanging) -> None:
    exchanging.run(EXPORT_STEPS + 3)
    exchanging.metrics.on_no_sparse_requests()
    assert exported("up_bytes_total") == (EXPORT_STEPS + 3) * UP_BYTES
    exchanging.run(2)
    exchanging.metrics.on_no_sparse_requests()
    assert exported("up_bytes_total") == (EXPORT_STEPS + 5) * UP_BYTES


def test_a_request_that_stays_dense_is_counted_once_a_reason(exchanging: Exchanging) -> None:
    first, second = (SimpleNamespace(cache_rank_dense_reasons=set()) for _ in range(2))
    for _ in range(2):
        exchanging.metrics.series.count_dense(first, "max_sparse_requests")
        exchanging.metrics.series.count_dense(first, "down")
    exchanging.metrics.series.count_dense(second, "down")
    counted = [
        exported("dense_requests_total", reason=reason)
        for reason in ("max_sparse_requests", "down", "asked")
    ]
    assert counted == [1, 2, 0]


def test_a_report_sets_what_is_held_and_adds_what_is_new(exchanging: Exchanging) -> None:
    def shown() -> list[float | None]:
        names = ("up", "tokens_held", "bytes_held", "delta_overflow_total")
        return [exported(name) for name in (*names, "refused_messages_total")]

    report = exchanging.metrics.on_report
    report(Report(tokens_held=5, bytes_held=70, overflow_tokens=3, refused_messages=1))
    assert shown() == [1, 5, 70, 3, 1]
    report(Report(tokens_held=4, bytes_held=60, overflow_tokens=5, refused_messages=1))
    assert shown() == [1, 4, 60, 5, 1]
    report(None)
    assert shown() == [0, 0, 0, 5, 1]
    report(Report(overflow_tokens=2))  # of the next cache rank
    assert shown() == [1, 0, 0, 7, 1]
    assert exchanging.metrics.state()["overflow_tokens"] == 2


def test_waits_and_losses_are_counted(
    exchanging: Exchanging, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = exchanging.metrics
    exchange: Any = SimpleNamespace(waited=0.25, was_late=True)
    exchanging.counters.tokens_shipped = 2000
    with caplog.at_level("INFO", logger="sglang_ext.metrics"):
        metrics.on_step(ARGS.decode_log_interval, exchange, 3)
    (line,) = caplog.messages
    assert "#sparse-req: 3" in line
    assert "0.25 ms/step, shipped: 2.0 tokens/step" in line
    assert exported("step_wait_seconds_sum") == 0.25
    state = metrics.state()
    assert (state["steps_waited"], state["wait_seconds"]) == (1, 0.25)


def test_losses_and_failed_starts_are_counted_with_the_delay(exchanging: Exchanging) -> None:
    def shown() -> list[float | None]:
        names = ("losses_total", "failed_starts_total", "restart_delay_seconds")
        return [exported(name) for name in names]

    assert shown() == [0, 0, 0]
    exchanging.metrics.on_loss(Loss(True, "silent", "killed by SIGKILL", "", 90.0, 0.0))
    exchanging.metrics.on_loss(Loss(False, "ended", "exit status 1", "no memory", 2.0, 4.0))
    assert shown() == [1, 1, 4]
