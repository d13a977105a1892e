"""Starts the cache-rank process, watches it, and starts it again when it dies.

One thread owns the process from spawn to death. The scheduler only reads `connection`: a live
connection, or None while the cache rank is down.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import zmq

from cache_rank.channels.control import ControlReceiver, ControlSender
from cache_rank.channels.link import Link, TransferBackend, make_rendezvous, transfer_backend
from cache_rank.channels.transport import INFERENCE
from cache_rank.config import CacheRankConfig
from cache_rank.process import LINK_SECONDS, Launch
from cache_rank.protocol import Open, Opened, Ready, Report, ToInferenceRank

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""A process must be ready within this; importing torch on a busy machine takes most of it."""

POLL_SECONDS = 0.1
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.5, 30.0
STABLE_SECONDS = 60.0
"""A cache rank that lived this long restarts without delay."""


class CacheRankDownError(RuntimeError):
    """The cache rank died, stopped, or did not answer in time."""


class Place(NamedTuple):
    """Where the two ranks are.

    Attributes:
        address: host name or IP of the interface that the channels bind to.
        inference_device, cache_device: as torch names them.
        trace: file that the cache rank appends its timeline to; empty for none.
        memory_fraction: of the free memory, which the cache rank takes for tokens; None leaves it
            to the cache rank.
        transfer_backend: that the user wants between them.
    """

    address: str
    inference_device: str = "cpu"
    cache_device: str = "cpu"
    trace: str = ""
    memory_fraction: float | None = None
    transfer_backend: Literal["auto", "peer", "nccl"] = "auto"


class Connection:
    """One running cache-rank process and the channels to it.

    Attributes:
        control: to send control messages; used by the scheduler thread only.
        link: the data channels; used by the scheduler thread only.
        capacity_tokens: how many tokens fit in the cache rank's memory.
        transfer_backend: what carries the steps.
        pid: of the process.
        before_abort: called before transfers under way are cut off, from any thread.
        check: called a few times a second by the watching thread; raises CacheRankDownError.
    """

    def __init__(self, name: str, place: Place, timeout: float) -> None:
        """Spawn the process; it is not ready yet."""
        self.timeout = timeout
        self.capacity_tokens = 0
        self.before_abort: Callable[[], None] = lambda: None
        self.check: Callable[[], None] = lambda: None
        self._place = place
        address = place.address
        self._secret = secrets.token_bytes(32)
        self._context: zmq.Context[Any] = zmq.Context()
        self._reports: ControlReceiver[ToInferenceRank] = ControlReceiver(
            self._context, address, self._secret, ToInferenceRank
        )
        launch = Launch(
            name=name,
            secret=self._secret.hex(),
            report_endpoint=self._reports.endpoint,
            address=address,
            device=place.cache_device,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cache_rank.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self._process.stdin.flush()
        self._heartbeat = self._process.stdout.fileno()
        self._last_beat: float | None = None
        self.pid = self._process.pid
        self.control: ControlSender
        self.link: Link
        self.transfer_backend: TransferBackend
        self._is_linked = False
        self._cut_off = threading.Lock()

    def open(self, config: CacheRankConfig) -> None:
        """Wait until the process is ready, and connect the data channels.

        Raises:
            CacheRankDownError: it died or was not ready in time.
        """
        ready = self._expect(Ready)
        self.control = ControlSender(self._context, ready.endpoint, self._secret)
        folder = tempfile.mkdtemp(prefix="cache-rank-")  # readable by this user only
        try:
            place = self._place
            device = torch.device(place.inference_device)
            backend = transfer_backend(
                place.transfer_backend, device, torch.device(place.cache_device)
            )
            rendezvous = make_rendezvous(backend, folder)
            self.transfer_backend = backend
            self.control.send(Open(config, rendezvous, place.trace, place.memory_fraction))
            ends = (rendezvous, INFERENCE, device, place.address, self._secret)
            self.link = Link(config, *ends, LINK_SECONDS)
            self._is_linked = True
            self.capacity_tokens = self._expect(Opened).capacity_tokens
        finally:
            shutil.rmtree(folder)

    def _expect(self, kind: type[Any]) -> Any:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            message = self._reports.receive(POLL_SECONDS)
            if isinstance(message, kind):
                return message
            self._check_alive()
        raise CacheRankDownError(f"not {kind.__name__.lower()} within {START_SECONDS:.0f} s")

    def watch(self, on_report: Callable[[Report], None]) -> None:
        """Pass reports on until the process dies or stops.

        Raises:
            CacheRankDownError: why it ended.
        """
        while True:
            message = self._reports.receive(POLL_SECONDS)
            if isinstance(message, Report):
                on_report(message)
            self._check_alive()
            self.check()

    def _check_alive(self) -> None:
        while select.select([self._heartbeat], [], [], 0)[0]:
            if not os.read(self._heartbeat, 4096):
                status = self._process.wait()
                raise CacheRankDownError(f"process {self.pid} ended with status {status}")
            self._last_beat = time.monotonic()
        if self._last_beat is not None and time.monotonic() - self._last_beat > self.timeout:
            raise CacheRankDownError(f"process {self.pid} is silent for {self.timeout:g} s")

    def kill(self) -> None:
        """End the process, whatever state it is in. Safe from any thread, and more than once."""
        self._process.kill()
        with self._cut_off:
            if self._is_linked:
                self.before_abort()
                self.link.abort()

    def close(self) -> None:
        """Kill and reap the process, and close what belongs to the watching thread."""
        self.kill()
        self._process.wait()
        if self._is_linked:
            self.link.finish()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._reports.close()


class Supervisor:
    """Keeps a cache rank running.

    Attributes:
        connection: to the running cache rank, or None while it is down.
        starts: how many times a cache rank was opened.
        start_seconds: how long the last one took from spawn to open.
        on_report: called in the supervisor's thread with each report, the first when the cache rank
            comes up, and with None when it goes down.
    """

    def __init__(self, name: str, place: Place, timeout: float) -> None:
        """Spawn the first process at once, so that it loads while the model does."""
        self.connection: Connection | None = None
        self.starts = 0
        self.start_seconds = 0.0
        self._name = name
        self._place = place
        self._timeout = timeout
        self.on_report: Callable[[Report | None], None] = lambda report: None
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
                connection = Connection(self._name, self._place, self._timeout)
                self._configured.wait()
                if self._closing.is_set() or self._config is None:
                    return
                connection.open(self._config)
                self._publish(connection, time.monotonic() - started)
                connection.watch(lambda report: self.on_report(report))
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
