"""Prometheus series of selection in SGLang's process, and the periodic log line."""

from __future__ import annotations

import logging
from typing import NamedTuple

from sglang_ext.flags import CacheRankFlags
from sglang_ext.metrics import EXPORT_STEPS, Series

logger = logging.getLogger(__name__)

_GAUGES = {"sparse_requests": "Requests decoding over selected tokens"}
_COUNTERS = {
    "sparse_steps": "Request steps over selected tokens",
    "attended_tokens": "Tokens that a KV head attended to in these steps",
}


class _Totals(NamedTuple):
    """What is exported, in the order of _COUNTERS."""

    sparse_steps: int
    attended_tokens: int


class InlineMetrics:
    """Counts the decode steps of a scheduler process, and exports it when SGLang does."""

    def __init__(self, args: CacheRankFlags, tp_rank: int) -> None:
        labels = {"placement": args.placement}
        self.series = Series(args, tp_rank, labels, _GAUGES, _COUNTERS, ("asked",))
        # The ranks of a server say the same.
        self._log_interval = args.decode_log_interval if tp_rank == 0 else 0
        self._steps = 0
        self._totals = self._exported = self._logged = _Totals(0, 0)

    def on_decode(self, requests: int, sparse_requests: int, attended_tokens: int) -> None:
        """Count a decode step of so many requests, of which the sparse ones attend to tokens."""
        self._steps += 1
        self._totals = _Totals(
            self._totals.sparse_steps + sparse_requests,
            self._totals.attended_tokens + attended_tokens,
        )
        self.series.set("sparse_requests", sparse_requests)
        if self._steps % EXPORT_STEPS == 0:
            self._export()
        if self._log_interval and self._steps % self._log_interval == 0:
            self._log(requests, sparse_requests)

    def on_no_sparse_requests(self) -> None:
        """No request is sparse any more."""
        self.series.set("sparse_requests", 0)
        self._export()

    def _export(self) -> None:
        for name, now, before in zip(_COUNTERS, self._totals, self._exported, strict=True):
            self.series.add(name, now - before)
        self._exported = self._totals

    def _log(self, requests: int, sparse_requests: int) -> None:
        """Write a line about the steps since the last one, if some were sparse."""
        sparse_steps = self._totals.sparse_steps - self._logged.sparse_steps
        attended = self._totals.attended_tokens - self._logged.attended_tokens
        self._logged = self._totals
        if sparse_steps:
            logger.info(
                "Sparse decode, #sparse-req: %d, #dense-req: %d, sparse: %.1f requests/step, "
                "attended: %.0f tokens/request",
                sparse_requests,
                requests - sparse_requests,
                sparse_steps / self._log_interval,
                attended / sparse_steps,
            )
