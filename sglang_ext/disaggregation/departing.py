"""The prefill server's side: K and V go out chunk by chunk, as they are computed."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_rank.pages import PAGE_TOKENS
from sglang_ext.disaggregation.codec import HostPages, PoolRows, memory_of, page_starts
from sglang_ext.disaggregation.wire import (
    ALIVE_SECONDS,
    Alive,
    Answer,
    End,
    Frame,
    Hello,
    Link,
    Page,
    Tail,
    Wire,
    WireError,
)

logger = logging.getLogger(__name__)


class Listener:
    """Takes the connections of decode servers, each for one request; they wait by its room.

    Attributes:
        address, port: what it is bound to.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        self.address, self.port = address, int(self._socket.getsockname()[1])
        self.why_not: Callable[[Hello], str | None] = lambda hello: "the model is not loaded yet"
        self._waiting: dict[int, tuple[Hello, Wire, float]] = {}
        self._refused: dict[int, tuple[str, float]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="transfers").start()

    def take(self, room: int) -> tuple[Hello, Wire] | None:
        """Take the connection for a room, if it has come."""
        with self._lock:
            found = self._waiting.pop(room, None)
        return found and found[:2]

    def why_refused(self, room: int) -> str | None:
        """Say once why a decode server was refused that came for a room."""
        with self._lock:
            found = self._refused.pop(room, None)
        return found and found[0]

    def drop_unclaimed(self, seconds: float) -> None:
        """End connections for which no request has come in so many seconds; forget refusals."""
        latest = time.monotonic() - seconds
        with self._lock:
            of_late = {room: each for room, each in self._refused.items() if each[1] >= latest}
            self._refused = of_late
            old = [room for room, (*_, since) in self._waiting.items() if since < latest]
        for room in old:
            self.drop(room)

    def drop(self, room: int) -> None:
        """End the connection for a room that nobody has taken, if there is one."""
        if (found := self.take(room)) is not None:
            found[1].abort()
            found[1].close()

    def _accept(self) -> None:
        while True:
            try:
                connected, peer = self._socket.accept()
            except OSError as error:  # too many are open
                logger.warning("cache rank: a transfer cannot begin: %s", error)
                time.sleep(ALIVE_SECONDS)
                continue
            threading.Thread(target=self._greet, args=(connected, peer), daemon=True).start()

    def _greet(self, connected: socket.socket, peer: Any) -> None:
        wire = Wire(connected)
        try:
            number = wire.challenge()
            hello, theirs = wire.hear(self._secret, number)
            refused = self.why_not(hello)
            wire.answer(self._secret, number, theirs, Answer(refused))
            if refused is not None:
                with self._lock:
                    self._refused[hello.room] = refused, time.monotonic()
                raise WireError(refused)
        except WireError as error:
            logger.warning("cache rank: a transfer to %s is refused: %s", peer[0], error)
            wire.close()
            return
        self.drop(hello.room)
        with self._lock:
            self._waiting[hello.room] = hello, wire, time.monotonic()


class _Chunk(NamedTuple):
    """Rows, (n,) int64, whose K and V are there after these events; the last has metadata."""

    rows: Tensor
    after: Sequence[Any]
    metadata: bytes | None


class Departure:
    """Sends K and V of one request, on a thread of its own.

    Attributes:
        is_done: the decode server has all.
        failure: why nothing more is sent; None while nothing is wrong.
        seconds: from the first chunk until the decode server had all.
        sent_bytes: so far.
    """

    def __init__(
        self, wire: Wire, pool: PoolRows, pages: HostPages, link: Link, codes: str
    ) -> None:
        self.is_done, self.seconds = False, 0.0
        self.failure: str | None = None
        self._wire, self._pool, self._pages, self._link = wire, pool, pages, link
        self._codes = codes
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._began = 0.0
        threading.Thread(target=self._run, daemon=True, name="departure").start()

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    def send(self, rows: Tensor, after: Sequence[Any], metadata: bytes | None) -> None:
        """Let tokens go, (n,) int64 pool rows on the host; metadata goes behind the last ones."""
        self._began = self._began or time.monotonic()
        self._chunks.put(_Chunk(rows, after, metadata))

    def fail(self, why: str) -> None:
        """End the transfer, unless it has ended; the decode server sees the connection end."""
        if self.failure is None and not self.is_done:
            self.failure = why
            self._wire.abort()
            self._chunks.put(None)

    def _run(self) -> None:
        try:
            self._pool.enter_thread()
            self._send_all()
            self.seconds = time.monotonic() - self._began
            self.is_done = True
        except (WireError, ValueError) as error:
            self.fail(str(error))
        except Exception as error:
            logger.exception("cache rank: a transfer failed")
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            self._wire.close()

    def _send_all(self) -> None:
        rows = torch.empty(0, dtype=torch.int64)
        while (chunk := self._next_chunk()) is not None:
            # Not on the device: what is queued aside for other requests would wait, too.
            for event in chunk.after:
                event.synchronize()
            rows = torch.cat((rows, chunk.rows))
            starts = page_starts(len(rows))
            for start in starts:
                self._send_page(rows[start : start + PAGE_TOKENS])
            rows = rows[len(starts) * PAGE_TOKENS :]
            if chunk.metadata is not None:
                if len(rows):
                    self._send_tail(rows)
                self._send(End(len(chunk.metadata)), memoryview(chunk.metadata))
                self._wire.wait_acknowledged()
                return

    def _next_chunk(self) -> _Chunk | None:
        """Wait for what is computed, as long as the decode server is there."""
        while True:
            try:
                return self._chunks.get(timeout=ALIVE_SECONDS)
            except queue.Empty:
                self._send(Alive())  # which also tells whether the peer is there

    def _send_page(self, rows: Tensor) -> None:
        with self._pool.lock:
            size = self._pool.codec(self._codes).packed_bytes
        self._send_tokens(Page(self._codes, size), rows)

    def _send_tail(self, rows: Tensor) -> None:
        self._send_tokens(Tail(len(rows), len(rows) * self._pool.token_bytes), rows)

    def _send_tokens(self, frame: Page | Tail, rows: Tensor) -> None:
        while (buffer := self._pages.take(frame.bytes, ALIVE_SECONDS)) is None:
            self._send(Alive())
        try:
            with self._pool.lock, self._pool.aside():
                try:
                    self._read(frame, rows, buffer[: frame.bytes])
                except ValueError:
                    self._pool.forget(self._codes)  # it remembers what it could not encode
                    raise
            self._send(frame, memory_of(buffer))
        finally:
            self._pages.give_back(buffer)

    def _read(self, frame: Page | Tail, rows: Tensor, target: Tensor) -> None:
        """Read tokens on the device, as codes or as they are, to the host."""
        pool, on_device = self._pool, self._pool.rows_on_device(rows)
        codec = pool.codec(frame.codes) if isinstance(frame, Page) else None
        found = codec.encode(on_device) if codec else pool.collect(on_device)
        target.copy_(found.view(-1).view(torch.uint8), non_blocking=True)
        if (mark := pool.mark()) is not None:
            mark.synchronize()
        if codec is not None:
            codec.check()

    def _send(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._wire.send(frame, payload, self._link)
