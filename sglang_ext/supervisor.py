"""Starts the cache-rank process, watches it, and starts it again when it dies.

One thread owns the process from spawn to death. The scheduler only reads `connection`: a live
connection, or None while the cache rank is down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import Measurement, Report
from sglang_ext.exchange.connection import (
    START_SECONDS,
    CacheRankDownError,
    Connection,
    Placement,
)

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.5, 30.0
STABLE_SECONDS = 60.0
"""A cache rank that has lived this long is started again without delay."""


class Supervisor:
    """Keeps a cache rank running.

    Attributes:
        connection: to the running cache rank, or None while it is down.
        starts: how many times a cache rank was opened.
        start_seconds: how long the last one took from spawn to open.
        on_report: called in the supervisor's thread with each report, the first when the cache rank
            comes up, and with None when it goes down.
        on_measurement: called in the supervisor's thread with each measurement.
    """

    def __init__(self, name: str, placement: Placement, timeout: float) -> None:
        """Spawn the first process at once, so that it loads while the model does."""
        self.connection: Connection | None = None
        self.starts = 0
        self.start_seconds = 0.0
        self._name = name
        self._placement = placement
        self._timeout = timeout
        self.on_report: Callable[[Report | None], None] = lambda report: None
        self.on_measurement: Callable[[Measurement], None] = lambda measurement: None
        self._config: CacheRankConfig | None = None
        self._configured = threading.Event()
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-supervisor", daemon=True)
        self._thread.start()

    def open(self, config: CacheRankConfig) -> Connection:
        """Open the first cache rank and wait for it.

        Raises:
            CacheRankDownError: it could not be started; the server must not start either.
        """
        self._config = config
        self._configured.set()
        with self._changed:
            self._changed.wait_for(lambda: self.connection or self._failure, 2 * START_SECONDS)
            if self.connection is None:
                self.close()
                raise CacheRankDownError(f"cannot start {self._name}: {self._failure}")
            return self.connection

    def fail(self, connection: Connection, reason: str) -> None:
        """Declare a connection dead; the thread ends its process and starts another."""
        if self.connection is connection:
            logger.error("%s is down: %s", self._name, reason)
            self.connection = None
        connection.kill()

    def close(self) -> None:
        """End the process and the thread; called by the thread that sends to the cache rank."""
        self._configured.set()
        with self._changed:
            self._closing.set()
            connection, self.connection = self.connection, None
        if connection is not None:
            connection.kill()
            # Else the socket and its context are garbage together, and the context waits for it.
            connection.control.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._closing.is_set():
            started = time.monotonic()
            connection = None
            try:
                connection = Connection(self._name, self._placement, self._timeout)
                self._configured.wait()
                if self._closing.is_set() or self._config is None:
                    return
                connection.open(self._config)
                self._publish(connection, time.monotonic() - started)
                connection.watch(
                    lambda report: self.on_report(report),
                    lambda measurement: self.on_measurement(measurement),
                )
            except Exception as error:  # whatever ended it, the rank is down and starts again
                self._withdraw(connection, error)
            finally:
                if connection is not None:
                    try:
                        connection.close()
                    except Exception:  # else nobody would start another
                        logger.exception("%s: a lost connection did not close", self._name)
            if time.monotonic() - started > STABLE_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            self._closing.wait(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    def _publish(self, connection: Connection, seconds: float) -> None:
        with self._changed:
            if self._closing.is_set():
                raise CacheRankDownError("closed while it started")
            self.starts += 1
            self.start_seconds = seconds
            self.connection = connection
            self._changed.notify_all()
        self.on_report(Report())
        logger.info(
            "%s is up: process %d, %d tokens fit, steps go by %s, started in %.1f s",
            self._name,
            connection.pid,
            connection.capacity_tokens,
            connection.transfer_backend,
            seconds,
        )

    def _withdraw(self, connection: Connection | None, error: Exception) -> None:
        if self._closing.is_set():
            return
        with self._changed:
            self._failure = str(error)
            if connection is not None and self.connection is connection:
                self.connection = None
                logger.error("%s is down: %s", self._name, error)
            elif self.starts == 0:
                logger.error("%s did not start: %s", self._name, error)
            self._changed.notify_all()
        self.on_report(None)
