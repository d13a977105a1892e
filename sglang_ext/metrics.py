"""Prometheus series on SGLang's `/metrics`, and the periodic log line.

Series are created in the scheduler process, which SGLang's multiprocess collector includes. What
only the cache rank knows arrives in its reports. `inline.metrics` has those of selection in this
process.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cache_rank.protocol import Report
from sglang_ext.flags import CacheRankFlags
from sglang_ext.request_state import DenseReason
from sglang_ext.two_ranks.exchange.base import Exchange, ExchangeCounters
from sglang_ext.two_ranks.restart_backoff import Loss

logger = logging.getLogger(__name__)

EXPORT_STEPS = 16
"""Counters are exported once in this many steps, and when no request is sparse any more."""

_WAIT_BUCKETS = (1e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1, 0.5, 1, 5)
"""The histogram of waits has these upper bounds, in seconds."""

_PREFIX = "sglang_cache_rank_"

_GAUGES = {
    "up": "Whether the cache rank is up",
    "capacity_tokens": "Tokens that fit on the cache rank",
    "tokens_held": "Tokens resident on the cache rank",
    "bytes_held": "Bytes of K and V on the cache rank",
    "sparse_requests": "Requests decoding over a working set",
    "restart_delay_seconds": "Seconds that the start of a cache rank is put off; 0 while it is up",
    "memory_released": "Whether there is no cache rank because SGLang's memory is released",
}

_EXCHANGE_COUNTERS = {
    "tokens_shipped": "Tokens that entered slots",
    "up_bytes": "Bytes of queries, keys and values sent",
    "down_bytes": "Bytes of answers received",
    "bulk_bytes": "Bytes of prompts shipped",
    "tokens_restored": "Tokens of prompts that came back, and were not prefilled again",
}
"""The fields of ExchangeCounters that are exported."""

_COUNTERS = {
    **_EXCHANGE_COUNTERS,
    "delta_overflow": "Tokens that waited for a later step to enter",
    "refused_messages": "Control messages refused by the cache rank",
    "stale_steps": "Request steps whose answer was lost",
    "retractions": "Requests recomputed because a cache rank was lost",
    "losses": "Cache ranks that were lost after they had started",
    "failed_starts": "Cache ranks that did not start",
}

_DENSE_REASONS: tuple[DenseReason, ...] = (
    "asked",
    "max_sparse_requests",
    "cache_rank_memory",
    "down",
    "cache_rank_losses",
)
"""These are counted, from zero on."""


class CacheRankMetrics:
    """Counts what happens between the ranks, and exports it when SGLang exports metrics.

    Attributes:
        series: of these; whoever knows of a value that nothing else depends on, sets it there.
        counters: exchanges add to them.
    """

    def __init__(self, args: CacheRankFlags, tp_rank: int) -> None:
        self._report = Report()
        self._log_interval = args.decode_log_interval
        self._steps_waited = 0
        self._wait_seconds = 0.0
        self._logged = (0, 0.0, 0)  # steps, their waits, tokens shipped: when a line was written
        self.counters = ExchangeCounters()
        self._exported = dict.fromkeys(_EXCHANGE_COUNTERS, 0)
        labels = {"residency": args.kv_residency}
        self.series = Series(args, tp_rank, labels, _GAUGES, _COUNTERS, _DENSE_REASONS)
        self.series.set("memory_released", 0)
        text = "Time that a decode step waited for the cache rank"
        self._waits = self.series.histogram("step_wait_seconds", text, _WAIT_BUCKETS)

    def on_step(self, step: int, exchange: Exchange, sparse_requests: int) -> None:
        self._wait_seconds += exchange.waited
        self._steps_waited += exchange.was_late
        if self._waits is not None:
            self._waits.observe(exchange.waited)
        self.series.set("sparse_requests", sparse_requests)
        if step % EXPORT_STEPS == 0:
            self._export_counters()
        if step % self._log_interval == 0:
            self._log(step, sparse_requests)

    def on_report(self, report: Report | None) -> None:
        """The cache rank reported, or went down. Called in the supervisor's thread."""
        last, self._report = self._report, report or Report()
        now = self._report
        self.series.set("up", report is not None)
        if report is not None:
            self.series.set("restart_delay_seconds", 0)
        self.series.set("tokens_held", now.tokens_held)
        self.series.set("bytes_held", now.bytes_held)
        self.series.add("delta_overflow", now.overflow_tokens - last.overflow_tokens)
        self.series.add("refused_messages", now.refused_messages - last.refused_messages)

    def on_loss(self, loss: Loss) -> None:
        """A cache rank was lost, or did not start. Called in the supervisor's thread."""
        self.series.add("losses" if loss.was_up else "failed_starts", 1)
        self.series.set("restart_delay_seconds", loss.restart_delay_seconds)

    def on_no_sparse_requests(self) -> None:
        self.series.set("sparse_requests", 0)
        self._export_counters()

    def state(self) -> dict[str, Any]:
        """Tell `/server_info` what was last reported, waited and exchanged."""
        return {
            **msgspec.structs.asdict(self._report),
            "steps_waited": self._steps_waited,
            "wait_seconds": self._wait_seconds,
            **dataclasses.asdict(self.counters),
        }

    def _export_counters(self) -> None:
        for name, last in self._exported.items():
            value = getattr(self.counters, name)
            self.series.add(name, value - last)
            self._exported[name] = value

    def _log(self, step: int, sparse_requests: int) -> None:
        """Write a line about the steps since the last one."""
        before = self._logged
        self._logged = (step, self._wait_seconds, self.counters.tokens_shipped)
        steps, wait_seconds, tokens_shipped = (
            now - then for now, then in zip(self._logged, before, strict=True)
        )
        logger.info(
            "Cache rank decode, #sparse-req: %d, #token held: %d, wait: %.2f ms/step, "
            "shipped: %.1f tokens/step",
            sparse_requests,
            self._report.tokens_held,
            1e3 * wait_seconds / steps,
            tokens_shipped / steps,
        )


class Series:
    """Prometheus series of this process, all with the same labels; none if SGLang exports none."""

    def __init__(
        self,
        args: CacheRankFlags,
        tp_rank: int,
        labels: Mapping[str, str],
        gauges: Mapping[str, str],
        counters: Mapping[str, str],
        reasons: Iterable[DenseReason],
    ) -> None:
        """Create series; `sparse_requests` and the requests that stay dense begin at zero."""
        self._is_on = args.enable_metrics
        self._shown: dict[str, float] = {}
        if not self._is_on:
            return
        # Imported here, because SGLang sets the multiprocess folder first.
        from prometheus_client import Counter, Gauge

        model = args.served_model_name or args.model_path
        self._labels = {"model_name": model, "tp_rank": str(tp_rank), **labels}
        names = [*self._labels]
        self._gauges = {
            name: Gauge(_PREFIX + name, text, names, multiprocess_mode="mostrecent").labels(
                **self._labels
            )
            for name, text in gauges.items()
        }
        self._counters = {
            name: Counter(_PREFIX + name, text, names).labels(**self._labels)
            for name, text in counters.items()
        }
        self._dense_requests = Counter(
            f"{_PREFIX}dense_requests",
            "Requests beyond the sparse threshold that stay dense",
            [*names, "reason"],
        )
        self.set("sparse_requests", 0)
        for reason in reasons:
            self._dense_requests.labels(**self._labels, reason=reason)

    def set(self, gauge: str, value: float) -> None:
        if self._is_on and self._shown.get(gauge) != value:
            self._gauges[gauge].set(value)
            self._shown[gauge] = value

    def add(self, counter: str, amount: int) -> None:
        """Add to a counter; what it counts may have begun again at zero, which adds nothing."""
        if self._is_on and amount > 0:
            self._counters[counter].inc(amount)

    def count_dense(self, request: Any, reason: DenseReason) -> None:
        """Count a request that stays dense, once a request and reason."""
        if self._is_on and reason not in request.cache_rank_dense_reasons:
            request.cache_rank_dense_reasons.add(reason)
            self._dense_requests.labels(**self._labels, reason=reason).inc()

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        """Create a histogram of these upper bounds; None if nothing is exported."""
        if not self._is_on:
            return None
        from prometheus_client import Histogram

        made = Histogram(_PREFIX + name, text, [*self._labels], buckets=buckets)
        return made.labels(**self._labels)
