"""Prometheus series of selection in SGLang's process, and the periodic log line."""

from __future__ import annotations

import logging

from sglang_ext.flags import CacheRankFlags
from sglang_ext.metrics import Series

logger = logging.getLogger(__name__)

_GAUGES = {"sparse_requests": "Requests decoding over selected tokens"}
_COUNTERS = {
    "sparse_steps": "Request steps over selected tokens",
    "attended_tokens": "Tokens that a KV head attended to in these steps",
}


class InlineMetrics:
    """Counts the decode steps of a scheduler process, and exports it when SGLang does."""

    def __init__(self, args: CacheRankFlags, tp_rank: int) -> None:
        labels = {"placement": args.placement}
        self.series = Series(args, tp_rank, labels, _GAUGES, _COUNTERS, ("asked",))
        # The ranks of a server say the same.
        self._log_interval = args.decode_log_interval if tp_rank == 0 else 0
        self._steps = self._sparse_steps = self._attended_tokens = 0  # since the last line

    def on_decode(self, requests: int, sparse_requests: int, attended_tokens: int) -> None:
        """Count a decode step of so many requests, of which the sparse ones attend to tokens."""
        self.series.set("sparse_requests", sparse_requests)
        self.series.add("sparse_steps", sparse_requests)
        self.series.add("attended_tokens", attended_tokens)
        self._steps += 1
        self._sparse_steps += sparse_requests
        self._attended_tokens += attended_tokens
        if self._steps == self._log_interval:
            self._log(requests, sparse_requests)

    def _log(self, requests: int, sparse_requests: int) -> None:
        """Write a line about the steps since the last one, if some were sparse."""
        if self._sparse_steps:
            logger.info(
                "Sparse decode, #sparse-req: %d, #dense-req: %d, sparse: %.1f requests/step, "
                "attended: %.0f tokens/request",
                sparse_requests,
                requests - sparse_requests,
                self._sparse_steps / self._steps,
                self._attended_tokens / self._sparse_steps,
            )
        self._steps = self._sparse_steps = self._attended_tokens = 0
