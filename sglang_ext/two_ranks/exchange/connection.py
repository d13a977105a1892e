"""A running cache-rank process and the channels to it."""

from __future__ import annotations

import os
import secrets
import select
import shutil
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
from sglang_ext.two_ranks.exchange.spawned_process import DYING_SECONDS, SpawnedProcess

PINNED_BYTES_A_SECOND = 1e9
"""A cache rank may take so long to pin memory of the host before it opens."""

START_SECONDS = 120.0
"""A process must be ready within this time; importing torch on a busy machine takes most of it."""

ENDING_SECONDS = 5.0
"""A process that has closed its output ends within this time, or is killed."""

STAND_BY_SECONDS = 1.0
"""While the process may not open yet, it is looked at this often."""

BUSY_SECONDS = 30.0
"""A process that beats, but reports nothing for this long, is stuck: in its GPU's driver, say."""

POLL_SECONDS = 0.1
"""The watching thread looks at the process this often."""


class CacheRankDownError(RuntimeError):
    """The cache rank died, stopped, or did not answer in time."""


class ProcessSettings(NamedTuple):
    """Where the two ranks run, what the cache rank may take, and what carries tensors.

    Attributes:
        address: host name or IP of the interface that the channels bind to.
        trace: file that the cache rank appends its timeline to; empty for none.
        memory_fraction: share of its free memory that the cache rank takes for tokens; None leaves
            the choice to the cache rank.
        host_bytes: memory of the host for pages of prompts that no request has.
    """

    address: str
    inference_device: str = "cpu"
    cache_device: str = "cpu"
    trace: str = ""
    memory_fraction: float | None = None
    host_bytes: int = 0
    transfer_backend: Literal["auto", "peer", "nccl"] = "auto"


def _environment(settings: ProcessSettings) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if settings.inference_device == settings.cache_device != "cpu":
        environment["NCCL_HOSTID"] = "cache rank"  # NCCL has no two ranks of a host on one GPU
    return environment


class Connection:
    """One running cache-rank process and the channels to it.

    Attributes:
        control: sends control messages; used by the scheduler thread only.
        link: the data channels; used by the scheduler thread only.
        is_dismissed: whether its end is wanted, so that it is no loss.
        before_abort: called before transfers under way are cut off, from any thread.
        check: called a few times a second by the watching thread; raises CacheRankDownError.
    """

    def __init__(self, name: str, settings: ProcessSettings, timeout: float) -> None:
        """Spawn the process; it is not ready yet."""
        self.timeout = timeout
        self.capacity_tokens = self.host_tokens = 0
        self.is_dismissed = False
        self.before_abort: Callable[[], None] = lambda: None
        self.check: Callable[[], None] = lambda: None
        self._settings = settings
        address = settings.address
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
            device=settings.cache_device,
        )
        self.process = SpawnedProcess(
            [sys.executable, "-m", "cache_rank.process"],
            msgspec.json.encode(launch),
            _environment(settings),
        )
        assert self.process.stdout is not None
        self._heartbeat = self.process.stdout.fileno()
        self._last_beat: float | None = None
        self.control: ControlSender
        self.link: Link
        self.transfer_backend: TransferBackend
        self._is_linked = False
        self._cut_off = threading.Lock()

    def stand_by(self, until: threading.Event) -> None:
        """Wait until the process may open.

        Raises:
            CacheRankDownError: it ended meanwhile.
        """
        while not until.wait(STAND_BY_SECONDS):
            if self.process.poll() is not None:
                raise CacheRankDownError(f"process {self.process.pid} ended")

    def open(self, config: CacheRankConfig) -> None:
        """Wait until the process is ready, and connect the data channels.

        Raises:
            CacheRankDownError: it died or was not ready in time.
        """
        ready = self._expect(Ready)
        self.control = ControlSender(self._context, ready.endpoint, self._secret)
        folder = tempfile.mkdtemp(prefix="cache-rank-")  # readable by this user only
        try:
            settings = self._settings
            device = torch.device(settings.inference_device)
            backend = transfer_backend(
                settings.transfer_backend, device, torch.device(settings.cache_device)
            )
            rendezvous = make_rendezvous(backend, folder)
            self.transfer_backend = backend
            memory = settings.memory_fraction, settings.host_bytes
            self.control.send(Open(config, rendezvous, settings.trace, *memory))
            ends = (rendezvous, INFERENCE, device, settings.address, self._secret)
            self.link = Link(config, *ends, LINK_SECONDS)
            self._is_linked = True
            opened: Opened = self._expect(Opened, settings.host_bytes / PINNED_BYTES_A_SECOND)
            self.capacity_tokens, self.host_tokens = opened.capacity_tokens, opened.host_tokens
        finally:
            shutil.rmtree(folder)

    def _expect(self, kind: type[Any], pinning_seconds: float = 0.0) -> Any:
        seconds = START_SECONDS + pinning_seconds
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            message = self._reports.receive(POLL_SECONDS)
            if isinstance(message, kind):
                return message
            self._check_alive()
        raise CacheRankDownError(f"not {kind.__name__.lower()} within {seconds:.0f} s")

    def watch(self, on_report: Callable[[Report], None]) -> None:
        """Pass reports on until the process dies or stops.

        Raises:
            CacheRankDownError: why it ended.
        """
        reported = time.monotonic()
        while True:
            message = self._reports.receive(POLL_SECONDS)
            if isinstance(message, Report):
                reported = time.monotonic()
                on_report(message)
            self._check_alive()
            if (busy := time.monotonic() - reported) > BUSY_SECONDS:
                raise CacheRankDownError(
                    f"process {self.process.pid} has been stuck for {busy:.0f} s"
                )
            self.check()

    def _check_alive(self) -> None:
        while select.select([self._heartbeat], [], [], 0)[0]:
            if not os.read(self._heartbeat, 4096):
                self.process.end(ENDING_SECONDS)
                raise CacheRankDownError(f"process {self.process.pid} ended")
            self._last_beat = time.monotonic()
        if self._last_beat is not None and time.monotonic() - self._last_beat > self.timeout:
            raise CacheRankDownError(f"process {self.process.pid} is silent for {self.timeout:g} s")

    def kill(self, patience: float = DYING_SECONDS) -> None:
        """End the process, whatever state it is in. Safe from any thread, and more than once.

        Args:
            patience: seconds in which it may end by itself, so that it is known how it did.
        """
        self.process.end(patience)
        with self._cut_off:
            if self._is_linked:
                self.before_abort()
                self.link.abort()

    def close(self) -> None:
        """Kill and reap the process, and close what belongs to the watching thread."""
        self.kill(patience=0)
        self.process.wait()
        if self._is_linked:
            self.link.finish()
        self.process.close_pipes()
        self._reports.close()
