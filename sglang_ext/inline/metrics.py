"""Prometheus series of selection in SGLang's process, and the periodic log line."""

from __future__ import annotations

import logging
from typing import Any

from sglang_ext.flags import CacheRankFlags
from sglang_ext.metrics import EXPORT_STEPS, make_series

logger = logging.getLogger(__name__)

_GAUGES = {"sparse_requests": "Requests decoding over selected tokens"}
_COUNTERS = {"sparse_steps": "Request steps over selected tokens"}


class InlineMetrics:
    """Counts the decode steps of a scheduler process, and exports it when SGLang does."""

    def __init__(self, args: CacheRankFlags, tp_rank: int) -> None:
        labels = {"placement": args.placement}
        self._series = make_series(args, tp_rank, labels, _GAUGES, _COUNTERS, ("asked",))
        # The ranks of a server say the same.
        self._log_interval = args.decode_log_interval if tp_rank == 0 else 0
        self._steps = 0
        self._sparse_steps = 0
        self._exported_sparse_steps = 0
        self._logged_sparse_steps = 0

    def on_decode(self, requests: int, sparse_requests: int) -> None:
        """Count a decode step of so many requests."""
        self._steps += 1
        self._sparse_steps += sparse_requests
        if self._series is not None:
            self._series.set("sparse_requests", sparse_requests)
            if self._steps % EXPORT_STEPS == 0:
                self._export()
        if self._log_interval and self._steps % self._log_interval == 0:
            self._log(requests, sparse_requests)

    def on_asked(self, request: Any) -> None:
        """A long request stays dense because it asks for it."""
        if self._series is not None:
            self._series.count_dense(request, "asked")

    def on_no_sparse_requests(self) -> None:
        """No request is sparse any more."""
        if self._series is not None:
            self._series.set("sparse_requests", 0)
            self._export()

    def _export(self) -> None:
        assert self._series is not None
        self._series.add("sparse_steps", self._sparse_steps - self._exported_sparse_steps)
        self._exported_sparse_steps = self._sparse_steps

    def _log(self, requests: int, sparse_requests: int) -> None:
        """Write a line about the steps since the last one, if some were sparse."""
        sparse_steps = self._sparse_steps - self._logged_sparse_steps
        self._logged_sparse_steps = self._sparse_steps
        if sparse_steps:
            logger.info(
                "Sparse decode, #sparse-req: %d, #dense-req: %d, sparse: %.1f requests/step",
                sparse_requests,
                requests - sparse_requests,
                sparse_steps / self._log_interval,
            )
