"""Prometheus series on SGLang's `/metrics`, and the periodic log line.

Series are created in the scheduler process, which SGLang's multiprocess collector includes. What
only the cache rank knows arrives in its reports.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import Report
from sglang_ext.exchange.base import Exchange, ExchangeCounters
from sglang_ext.lifecycle import DenseReason
from sglang_ext.recall import LayerMeans, RecallStatistics
from sglang_ext.server_args import CacheRankServerArgs

logger = logging.getLogger(__name__)

EXPORT_STEPS = 16
"""Counters are exported every so many steps, and when no request is sparse any more."""

_WAIT_BUCKETS = (
    1e-5,
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    2.5e-2,
    0.1,
    0.5,
    1.0,
    5.0,
)


class CacheRankMetrics:
    """Counts what happens between the ranks; exports it when SGLang exports metrics.

    Attributes:
        recall: what the cache rank measured of selections.
    """

    def __init__(self, args: CacheRankServerArgs, config: CacheRankConfig, tp_rank: int) -> None:
        self.recall = RecallStatistics(config, args.dense_layers)
        self._report = Report()
        self._log_interval = args.decode_log_interval
        self._steps_waited = 0
        self._wait_seconds = 0.0
        self._log_start = (0, 0.0, 0)
        self._counters = ExchangeCounters()
        self._exported = {"up_bytes": 0, "down_bytes": 0, "bulk_bytes": 0, "tokens_shipped": 0}
        self._sparse_requests = 0
        self._series: _Series | None = None
        if args.enable_metrics:
            labels = {
                "model_name": args.served_model_name,
                "tp_rank": str(tp_rank),
                "residency": args.kv_residency,
            }
            self._series = _Series(labels)

    def on_connect(self, counters: ExchangeCounters) -> None:
        """A new exchange begins, whose counters start at zero and go on."""
        self._export_counters()
        self._counters = counters
        self._exported = dict.fromkeys(self._exported, 0)
        self._log_start = (self._log_start[0], self._wait_seconds, 0)

    def on_step(self, step: int, exchange: Exchange, sparse_requests: int) -> None:
        """Count a step that was exchanged."""
        self._wait_seconds += exchange.waited
        self._steps_waited += exchange.was_late
        if self._series is not None:
            self._series.step_wait.observe(exchange.waited)
            self._set_sparse_requests(sparse_requests)
            if step % EXPORT_STEPS == 0:
                self._export_counters()
        if step % self._log_interval == 0:
            self._log(step, exchange, sparse_requests)

    def on_report(self, report: Report | None) -> None:
        """The cache rank reported, or went down. Called in the supervisor's thread."""
        previous, self._report = self._report, report or Report()
        for measurement in self._report.measurements:
            by_layer = self.recall.add(measurement)
            if self._series is not None and by_layer:
                self._series.set_recall(by_layer)
        if self._series is not None:
            self._series.up.set(report is not None)
            self._series.set_report(self._report, previous)

    def on_stale(self, steps: int) -> None:
        """Rows of a step whose answer was lost."""
        if self._series is not None:
            self._series.stale_steps.inc(steps)

    def on_retraction(self) -> None:
        """A request is recomputed because a cache rank was lost."""
        if self._series is not None:
            self._series.retractions.inc()

    def on_dense(self, request: Any, reason: DenseReason) -> None:
        """A long request stays dense; counted once a request and reason."""
        if reason not in request.cache_rank_dense_reasons:
            request.cache_rank_dense_reasons.add(reason)
            if self._series is not None:
                self._series.dense_requests.labels(**self._series.values, reason=reason).inc()

    def on_no_sparse_requests(self) -> None:
        """No request is sparse any more."""
        self._set_sparse_requests(0)
        self._export_counters()

    def state(self) -> dict[str, Any]:
        """For `/server_info`."""
        report, latest = self._report, self.recall.latest
        return {
            "tokens_held": report.tokens_held,
            "bytes_held": report.bytes_held,
            "epochs": report.epochs,
            "overflow_tokens": report.overflow_tokens,
            "refused_messages": report.refused_messages,
            **(latest._asdict() if latest else dict.fromkeys(LayerMeans._fields)),
            "recall_by_head": self.recall.by_head(),
            "steps_waited": self._steps_waited,
            "wait_seconds": self._wait_seconds,
        }

    def _set_sparse_requests(self, requests: int) -> None:
        if self._series is not None and requests != self._sparse_requests:
            self._series.sparse_requests.set(requests)
            self._sparse_requests = requests

    def _export_counters(self) -> None:
        """Export what was counted since the last time."""
        if self._series is None:
            return
        for name, last in self._exported.items():
            value = getattr(self._counters, name)
            self._series.increment(name, value - last)
            self._exported[name] = value

    def _log(self, step: int, exchange: Exchange, sparse_requests: int) -> None:
        last_step, wait, shipped = self._log_start
        counters = exchange.counters
        self._log_start = (step, self._wait_seconds, counters.tokens_shipped)
        interval = step - last_step
        latest = self.recall.latest
        logger.info(
            "Cache rank decode, #sparse-req: %d, #token held: %d, wait: %.2f ms/step, "
            "shipped: %.1f tokens/step, recall: %.3f",
            sparse_requests,
            self._report.tokens_held,
            1e3 * (self._wait_seconds - wait) / interval,
            (counters.tokens_shipped - shipped) / interval,
            latest.recall if latest else math.nan,
        )


class _Series:
    """The Prometheus series, all with the same label values."""

    def __init__(self, values: dict[str, str]) -> None:
        # Imported here: SGLang sets the multiprocess folder first.
        from prometheus_client import Counter, Gauge, Histogram

        self.values = values
        names = list(values)

        def gauge(name: str, text: str) -> Any:
            series = Gauge(f"sglang_cache_rank_{name}", text, names, multiprocess_mode="mostrecent")
            return series.labels(**values)

        def counter(name: str, text: str) -> Any:
            return Counter(f"sglang_cache_rank_{name}", text, names).labels(**values)

        self.up = gauge("up", "Whether the cache rank is up")
        self.tokens_held = gauge("tokens_held", "Tokens resident on the cache rank")
        self.bytes_held = gauge("bytes_held", "Bytes of K and V on the cache rank")
        self.sparse_requests = gauge("sparse_requests", "Requests decoding over a working set")
        self.sparse_requests.set(0)
        self.measurements = counter(
            "recall_measurements", "Measurements of one layer group's recall"
        )
        measured = {
            "recall": "Share of the exact top tokens that the slots held",
            "attention_mass": "Share of attention probability that the slots held",
            "query_cosine": "Cosine of predicted and true queries",
        }
        self._measured = {name: gauge(name, text) for name, text in measured.items()}
        self._measured_by_layer = {
            name: Gauge(
                f"sglang_cache_rank_layer_{name}",
                f"{text}, last measured of a layer",
                [*names, "layer"],
                multiprocess_mode="mostrecent",
            )
            for name, text in measured.items()
        }
        self.overflow = counter("delta_overflow", "Tokens that waited for a later step to enter")
        self.refused = counter("refused_messages", "Control messages refused by the cache rank")
        self.stale_steps = counter("stale_steps", "Request steps whose answer was lost")
        self.retractions = counter(
            "retractions", "Requests recomputed because a cache rank was lost"
        )
        self._counters = {
            "tokens_shipped": counter("tokens_shipped", "Tokens that entered slots"),
            "up_bytes": counter("up_bytes", "Bytes of queries, keys and values sent"),
            "down_bytes": counter("down_bytes", "Bytes of answers received"),
            "bulk_bytes": counter("bulk_bytes", "Bytes of prompts shipped"),
        }
        self.dense_requests = Counter(
            "sglang_cache_rank_dense_requests",
            "Requests beyond the sparse threshold that stay dense",
            [*names, "reason"],
        )
        self.step_wait = Histogram(
            "sglang_cache_rank_step_wait_seconds",
            "Time that a decode step waited for the cache rank",
            names,
            buckets=_WAIT_BUCKETS,
        ).labels(**values)

    def increment(self, name: str, amount: int) -> None:
        if amount > 0:
            self._counters[name].inc(amount)

    def set_report(self, report: Report, previous: Report) -> None:
        self.tokens_held.set(report.tokens_held)
        self.bytes_held.set(report.bytes_held)
        self.overflow.inc(max(0, report.overflow_tokens - previous.overflow_tokens))
        self.refused.inc(max(0, report.refused_messages - previous.refused_messages))

    def set_recall(self, by_layer: Mapping[int, LayerMeans]) -> None:
        self.measurements.inc()
        for name, series in self._measured_by_layer.items():
            of_layers = {layer: getattr(means, name) for layer, means in by_layer.items()}
            self._measured[name].set(sum(of_layers.values()) / len(of_layers))
            for layer, value in of_layers.items():
                series.labels(**self.values, layer=layer).set(value)
