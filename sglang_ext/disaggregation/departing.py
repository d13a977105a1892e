"""The prefill server's side: K and V go out chunk by chunk, as they are computed."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_rank.channels.rate import RateLimit
from cache_rank.pages import PAGE_TOKENS
from sglang_ext.disaggregation.codec import HostPages, PoolRows, memory_of, page_starts
from sglang_ext.disaggregation.wire import (
    ALIVE_SECONDS,
    Alive,
    Answer,
    End,
    Frame,
    Hello,
    Metadata,
    Page,
    Part,
    Tail,
    Wire,
    WireError,
)

logger = logging.getLogger(__name__)

GREETED_AT_ONCE = 128
"""So many connections prove at once, at most, that they know the secret; others wait."""

FRAMES_AHEAD = 2
"""So many frames of a request are ready to be sent, at most, while another one is."""


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
        self._greeting = threading.Semaphore(GREETED_AT_ONCE)
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
            self._greeting.acquire()
            try:
                threading.Thread(target=self._greet, args=(connected, peer), daemon=True).start()
            except RuntimeError as error:  # there are too many threads
                logger.warning("cache rank: a transfer cannot begin: %s", error)
                self._greeting.release()
                connected.close()

    def _greet(self, connected: socket.socket, peer: Any) -> None:
        try:
            wire = Wire(connected)
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
            connected.close()
            return
        finally:
            self._greeting.release()
        self.drop(hello.room)
        with self._lock:
            self._waiting[hello.room] = hello, wire, time.monotonic()


class _Chunk(NamedTuple):
    """Rows, (n,) int64, whose K and V are there after these events; the last has metadata."""

    rows: Tensor
    after: Sequence[Any]
    metadata: bytes | None


class _Outbox:
    """What has been computed of a request, and is still to be sent; rows are (n,) int64.

    Attributes:
        pages: rows of pages of which nothing has gone.
        refining: rows of pages of which the rest has not.
        behind: rows that fill no page.
        has_all: nothing more will be computed.
    """

    def __init__(self) -> None:
        self.pages: deque[Tensor] = deque()
        self.refining: deque[Tensor] = deque()
        self.behind = torch.empty(0, dtype=torch.int64)
        self.has_all = False

    def add(self, chunk: _Chunk) -> None:
        rows = torch.cat((self.behind, chunk.rows))
        starts = page_starts(len(rows))
        self.pages += (rows[start : start + PAGE_TOKENS] for start in starts)
        self.behind = rows[len(starts) * PAGE_TOKENS :]
        self.has_all = chunk.metadata is not None


class Departure:
    """Sends K and V of one request: a thread reads and encodes while another one sends.

    Attributes:
        is_done: the decode server has all.
        failure: why nothing more is sent; None while nothing is wrong.
        seconds: from the first chunk until the decode server had all.
        sent_bytes: so far.
    """

    def __init__(
        self,
        wire: Wire,
        pool: PoolRows,
        pages: HostPages,
        link: RateLimit,
        codes: str,
        in_parts: bool,
    ) -> None:
        """Begin to send.

        Args:
            in_parts: whether what refines pages goes behind all that can be read without it, if
                there is such a part of these codes.
        """
        self.is_done, self.seconds = False, 0.0
        self.failure: str | None = None
        self._wire, self._pool, self._pages, self._link = wire, pool, pages, link
        self._codes, self._in_parts = codes, in_parts
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._frames: queue.Queue[tuple[Frame, Tensor | None]] = queue.Queue(FRAMES_AHEAD)
        self._began = 0.0
        for name, work in (("departure", self._read_all), ("departure wire", self._send_all)):
            threading.Thread(target=self._run, args=(work,), daemon=True, name=name).start()

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    def send(self, rows: Tensor, after: Sequence[Any], metadata: bytes | None) -> None:
        """Let tokens go, (n,) int64 pool rows on the host; metadata comes with the last ones."""
        self._began = self._began or time.monotonic()
        self._chunks.put(_Chunk(rows, after, metadata))

    def fail(self, why: str) -> None:
        """End the transfer, unless it has ended; the decode server sees the connection end."""
        if self.failure is None and not self.is_done:
            self.failure = why
            self._wire.abort()
            self._chunks.put(None)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._pool.enter_thread()
            work()
        except (WireError, ValueError) as error:
            self.fail(str(error))
        except Exception as error:
            logger.exception("cache rank: a transfer failed")
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            if self.failure is not None:  # each thread drops what may be left when it ends
                self._drop_frames()

    # What the thread does that reads.

    def _read_all(self) -> None:
        """Read metadata when it is known, then what can be read, then what refines it."""
        outbox = _Outbox()
        while self.failure is None:
            self._collect(outbox)
            if outbox.pages:
                self._read_page(outbox)
            elif outbox.has_all and len(outbox.behind):
                size = len(outbox.behind) * self._pool.token_bytes
                self._read_tokens(Tail(len(outbox.behind), size), outbox.behind)
                outbox.behind = outbox.behind[:0]
            elif outbox.refining:
                self._read_tokens(self._frame("rest"), outbox.refining.popleft())
            elif outbox.has_all:
                self._put(End(), None)
                return

    def _collect(self, outbox: _Outbox) -> None:
        """Take what is computed or soon will be; wait for more if nothing else is to be sent."""
        while not outbox.has_all:
            try:
                chunk = self._chunks.get(block=not outbox.pages and not outbox.refining)
            except queue.Empty:
                return
            if chunk is None:  # it has failed
                return
            if chunk.metadata is not None:
                metadata = torch.frombuffer(bytearray(chunk.metadata), dtype=torch.uint8)
                self._put(Metadata(len(metadata)), metadata)
            # Not on the device: what is queued aside for other requests would wait, too.
            for event in chunk.after:
                event.synchronize()
            outbox.add(chunk)

    def _read_page(self, outbox: _Outbox) -> None:
        rows = outbox.pages.popleft()
        frame = self._frame("first" if self._in_parts else "whole")
        self._read_tokens(frame, rows)
        if frame.part == "first":
            outbox.refining.append(rows)

    def _frame(self, part: Part) -> Page:
        with self._pool.lock:
            codec = self._pool.codec(self._codes)
            if not codec.comes_in_parts:
                part = "whole"
            return Page(self._codes, codec.part_bytes[part], part)

    def _read_tokens(self, frame: Page | Tail, rows: Tensor) -> None:
        buffer = None
        while buffer is None and self.failure is None:
            buffer = self._pages.take(frame.bytes, ALIVE_SECONDS)
        if buffer is None:
            return
        try:
            with self._pool.lock, self._pool.aside():
                try:
                    self._read(frame, rows, buffer[: frame.bytes])
                except ValueError:
                    self._pool.forget(self._codes)  # it remembers what it could not encode
                    raise
        except Exception:
            self._pages.give_back(buffer)
            raise
        self._put(frame, buffer)

    def _read(self, frame: Page | Tail, rows: Tensor, target: Tensor) -> None:
        """Read tokens on the device, as codes or as they are, to the host."""
        pool, on_device = self._pool, self._pool.rows_on_device(rows)
        if isinstance(frame, Page):
            codec = pool.codec(frame.codes)
            found = codec.take_part(codec.encode(on_device), frame.part)
        else:
            codec, found = None, pool.collect(on_device)
        target.copy_(found.view(-1).view(torch.uint8), non_blocking=True)
        if (mark := pool.mark()) is not None:
            mark.synchronize()
        if codec is not None:
            codec.check()

    def _put(self, frame: Frame, payload: Tensor | None) -> None:
        """Let the other thread send a frame; its payload is no longer ours."""
        while self.failure is None:
            try:
                return self._frames.put((frame, payload), timeout=ALIVE_SECONDS)
            except queue.Full:
                continue
        self._let_go(frame, payload)

    # What the thread does that sends.

    def _send_all(self) -> None:
        try:
            while self.failure is None:
                try:
                    frame, payload = self._frames.get(timeout=ALIVE_SECONDS)
                except queue.Empty:
                    self._wire.send(Alive(), None, self._link)  # tells whether the peer is there
                    continue
                try:
                    memory = None if payload is None else memory_of(payload)
                    self._wire.send(frame, memory, self._link)
                finally:
                    self._let_go(frame, payload)
                if isinstance(frame, End):
                    self._wire.wait_acknowledged()
                    self.seconds = time.monotonic() - self._began
                    self.is_done = True
                    return
        finally:
            self._wire.close()

    def _drop_frames(self) -> None:
        while True:
            try:
                self._let_go(*self._frames.get_nowait())
            except queue.Empty:
                return

    def _let_go(self, frame: Frame, payload: Tensor | None) -> None:
        if isinstance(frame, Page | Tail) and payload is not None:
            self._pages.give_back(payload)
