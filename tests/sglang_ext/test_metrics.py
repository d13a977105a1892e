"""When Prometheus series are exported: each count once, and none left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from cache_rank.config import CacheRankConfig, ModelShape
from sglang_ext.exchange.base import ExchangeCounters
from sglang_ext.metrics import EXPORT_STEPS, CacheRankMetrics

CONFIG = CacheRankConfig(ModelShape(2, 2, 1, 8, "float32", 1.0))
ARGS: Any = SimpleNamespace(
    dense_layers=1,
    decode_log_interval=1000,
    enable_metrics=True,
    served_model_name="model",
    kv_residency="bf16",
)
UP_BYTES, BULK_BYTES = 5, 70
"""Of a step, and of the prompt that is shipped before the first."""


def exported(series: str) -> float:
    labels = {"model_name": "model", "tp_rank": "0", "residency": "bf16"}
    value = REGISTRY.get_sample_value(f"sglang_cache_rank_{series}", labels)
    assert value is not None
    return value


class Exchanging:
    """Metrics, and the counters of an exchange with the cache rank."""

    def __init__(self) -> None:
        self.metrics = CacheRankMetrics(ARGS, CONFIG, tp_rank=0)
        self.steps = 0
        self.connect()

    def connect(self) -> None:
        self.counters = ExchangeCounters()
        self.metrics.on_connect(self.counters)

    def run(self, steps: int, sparse_requests: int = 1) -> None:
        for _ in range(steps):
            self.steps += 1
            self.counters.up_bytes += UP_BYTES
            exchange: Any = SimpleNamespace(counters=self.counters, waited=0.0, was_late=False)
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


def test_the_rest_is_exported_when_the_last_request_ends_and_only_once(
    exchanging: Exchanging,
) -> None:
    exchanging.run(EXPORT_STEPS + 3)
    for _ in range(2):
        exchanging.metrics.on_no_sparse_requests()
        assert exported("up_bytes_total") == (EXPORT_STEPS + 3) * UP_BYTES


def test_what_is_shipped_before_the_first_step_is_exported(exchanging: Exchanging) -> None:
    exchanging.counters.bulk_bytes += BULK_BYTES
    exchanging.metrics.on_no_sparse_requests()
    assert exported("bulk_bytes_total") == BULK_BYTES


@pytest.mark.parametrize("told", [False, True])
def test_counts_of_a_lost_cache_rank_and_of_the_next_one_add_up(
    exchanging: Exchanging, told: bool
) -> None:
    exchanging.run(EXPORT_STEPS + 3)
    if told:
        exchanging.metrics.on_no_sparse_requests()
    exchanging.connect()
    assert exported("up_bytes_total") == (EXPORT_STEPS + 3) * UP_BYTES
    exchanging.run(2)
    exchanging.metrics.on_no_sparse_requests()
    assert exported("up_bytes_total") == (EXPORT_STEPS + 5) * UP_BYTES


def test_a_request_that_stays_dense_is_counted_once_a_reason(exchanging: Exchanging) -> None:
    def counted(reason: str) -> float | None:
        labels = {"model_name": "model", "tp_rank": "0", "residency": "bf16", "reason": reason}
        return REGISTRY.get_sample_value("sglang_cache_rank_dense_requests_total", labels)

    first, second = (SimpleNamespace(cache_rank_dense_reasons=set()) for _ in range(2))
    for _ in range(2):
        exchanging.metrics.on_dense(first, "max_sparse_requests")
        exchanging.metrics.on_dense(first, "down")
    exchanging.metrics.on_dense(second, "down")
    assert (counted("max_sparse_requests"), counted("down"), counted("asked")) == (1, 2, None)


def test_the_gauge_follows_the_sparse_requests(exchanging: Exchanging) -> None:
    assert exported("sparse_requests") == 0
    for requests in (1, 3, 2):
        exchanging.run(1, requests)
        assert exported("sparse_requests") == requests
    exchanging.metrics.on_no_sparse_requests()
    assert exported("sparse_requests") == 0
