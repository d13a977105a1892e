"""Starts the cache-rank process, watches it, and starts it again when it dies.

One thread owns the process from spawn to death. The scheduler only reads `connection`: a live
connection, or None while the cache rank is down.

When SGLang releases memory, the process is ended. Its memory goes with it, whatever holds some: the
tokens, captured graphs, what libraries keep. The next process is spawned at once, as the first one
is while the model loads, and touches no GPU before it may open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import Report
from sglang_ext.two_ranks.exchange.connection import (
    ENDING_SECONDS,
    START_SECONDS,
    CacheRankDownError,
    Connection,
    ProcessSettings,
)
from sglang_ext.two_ranks.restart_backoff import LONGEST_DELAY_SECONDS, Loss, RestartBackoff

logger = logging.getLogger(__name__)

RESUME_SECONDS = 60.0
"""The scheduler waits so long for a cache rank when memory is resumed, and then goes on without."""


class Supervisor:
    """Keeps a cache rank running.

    Attributes:
        connection: to the running cache rank, or None while it is down.
        start_seconds: how long the last one took from spawn to open, without the time in which it
            was not to open yet.
        is_released: whether there is to be none, because memory is released.
        last_loss: the last cache rank that was lost or did not start, or None.
        on_report: called in the supervisor's thread with each report, the first when the cache rank
            comes up, and with None when it goes down.
        on_loss: called in the supervisor's thread with each loss and each failed start.
    """

    def __init__(
        self,
        name: str,
        settings: ProcessSettings,
        timeout: float,
        longest_delay: float = LONGEST_DELAY_SECONDS,
    ) -> None:
        """Spawn the first process at once, so that it loads while the model does."""
        self.connection: Connection | None = None
        self.starts = 0
        self.start_seconds = 0.0
        self.is_released = False
        self.losses = 0
        self.failed_starts = 0
        self.last_loss: Loss | None = None
        self._backoff = RestartBackoff(longest_delay)
        self._reason: str | None = None
        self._name = name
        self._settings = settings
        self._timeout = timeout
        self.on_report: Callable[[Report | None], None] = lambda report: None
        self.on_loss: Callable[[Loss], None] = lambda loss: None
        self._config: CacheRankConfig | None = None
        self._may_open = threading.Event()
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._spawned: Connection | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-supervisor", daemon=True)
        self._thread.start()

    def open(self, config: CacheRankConfig) -> Connection:
        """Open the first cache rank and wait for it.

        Raises:
            CacheRankDownError: it could not be started; the server must not start either.
        """
        self._config = config
        self._may_open.set()
        with self._changed:
            self._changed.wait_for(lambda: self.connection or self._failure, 2 * START_SECONDS)
            if self.connection is None:
                self.close()
                raise CacheRankDownError(f"cannot start {self._name}: {self._failure}")
            return self.connection

    def fail(self, connection: Connection, reason: str) -> None:
        """Declare a connection dead; the thread ends its process and starts another."""
        with self._changed:
            if self.connection is connection:
                self._reason = reason
                self.connection = None
        connection.kill()

    def release(self) -> None:
        """End the process and wait until its memory is free; `resume` opens another. No loss.

        Called by the thread that sends to the cache rank.
        """
        with self._changed:
            if self.is_released:
                return
            self.is_released = True
            self._may_open.clear()
            self.connection = None
            spawned = self._spawned
        if spawned is not None:
            spawned.is_dismissed = True
            spawned.kill(patience=0)
            spawned.process.end(ENDING_SECONDS)  # waits for what has been killed
        logger.info("%s has ended, because memory is released", self._name)

    def resume(self) -> None:
        """Let a process open again, and wait until it has or has failed, or for RESUME_SECONDS."""
        with self._changed:
            if not self.is_released:
                return
            self.is_released, self._failure = False, None
            self._may_open.set()
            self._changed.wait_for(lambda: self.connection or self._failure, RESUME_SECONDS)

    def close(self) -> None:
        """End the process and the thread; called by the thread that sends to the cache rank."""
        with self._changed:
            self._closing.set()
            connection, self.connection = self.connection, None
        self._may_open.set()
        if connection is not None:
            connection.kill(patience=0)
            # Else the socket and its context are garbage together, and the context waits for it.
            connection.control.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closing.is_set():
            started = time.monotonic()
            connection, up_since, delay = None, None, 0.0
            try:
                connection = self._spawned = Connection(self._name, self._settings, self._timeout)
                spawned = time.monotonic()
                connection.stand_by(self._may_open)
                waited = time.monotonic() - spawned
                if self._closing.is_set() or self._config is None:
                    return
                connection.open(self._config)
                up_since = time.monotonic()
                self._publish(connection, up_since - started - waited)
                connection.watch(lambda report: self.on_report(report))
            except Exception as error:  # whatever ended it, the rank is down and starts again
                delay = self._withdraw(connection, up_since, error)
            finally:
                self._spawned = None
                if connection is not None:
                    try:
                        connection.close()
                    except Exception:  # else nobody would start another
                        logger.exception("%s: a lost connection did not close", self._name)
            self._closing.wait(delay)

    def _publish(self, connection: Connection, seconds: float) -> None:
        with self._changed:
            if self._closing.is_set() or connection.is_dismissed:
                raise CacheRankDownError("ended while it started")
            self.starts += 1
            self.start_seconds = seconds
            self.connection = connection
            self._changed.notify_all()
        self.on_report(Report())
        logger.info(
            "%s is up: process %d, %d tokens fit, steps go by %s, started in %.1f s",
            self._name,
            connection.process.pid,
            connection.capacity_tokens,
            connection.transfer_backend,
            seconds,
        )

    def _withdraw(
        self, connection: Connection | None, up_since: float | None, error: Exception
    ) -> float:
        """Take a cache rank back, and say why if nobody asked for it.

        Returns:
            In how many seconds the next one is to be spawned.
        """
        if self._closing.is_set():
            return 0.0
        with self._changed:
            reason, self._reason = self._reason or str(error), None
            self.connection = None
        self.on_report(None)
        if connection is not None and connection.is_dismissed:
            return 0.0
        ending, last_words, lifetime = "no process", "", 0.0
        if connection is not None:
            connection.kill()
            lifetime = connection.process.age_seconds
            ending = connection.process.how_it_ended()
            last_words = connection.process.last_words()
        delay = self._backoff.after(0.0 if up_since is None else time.monotonic() - up_since)
        loss = Loss(up_since is not None, reason, ending, last_words, lifetime, delay)
        self.losses += loss.was_up
        self.failed_starts += not loss.was_up
        self.last_loss = loss
        logger.error("%s %s", self._name, loss.line())
        self.on_loss(loss)
        with self._changed:
            self._failure = reason if not last_words else f"{reason} ({ending}: {last_words})"
            self._changed.notify_all()
        return delay
