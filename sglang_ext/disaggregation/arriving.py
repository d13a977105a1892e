"""The decode server's side: a thread receives, and the scheduler puts K and V into pool rows.

It also passes each page on to a cache rank, if there is one.

Pool rows are written between steps by the scheduler's own thread, on a GPU aside and with events.
So rows go back to SGLang only when nothing writes to them any more, whatever has failed.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from cache_rank.pages import PAGE_TOKENS
from sglang_ext.disaggregation.codec import HostPages, PageCodec, PoolRows, memory_of
from sglang_ext.disaggregation.wire import (
    SILENCE_SECONDS,
    Alive,
    End,
    Hello,
    Metadata,
    Page,
    Tail,
    Wire,
    WireError,
)

logger = logging.getLogger(__name__)

PAGES_A_POLL = 8
"""Pages that are put into rows at once: decode steps of others do not wait for more."""


class Arrival:
    """K and V of one request, which come from a prefill server.

    Attributes:
        failure: why they do not come; None while nothing is wrong.
        metadata: SGLang's, with the first token; it may be there long before all K and V.
    """

    def __init__(
        self,
        pool: PoolRows,
        pages: HostPages,
        peer: tuple[str, int],
        secret: bytes,
        hello: Hello,
        rows: Tensor,
        after: Sequence[Any],
        pass_on: Callable[[Tensor, PageCodec, Tensor], None],
        write_beside: Callable[[Tensor], None],
        look_up_peer: Callable[[], tuple[str, int] | None],
    ) -> None:
        """Connect and receive in the background.

        Args:
            rows: (n,) int64 pool rows of the tokens, on the host.
            after: on a GPU, events after which nothing else writes to these rows.
            pass_on: called when a page's writes to its rows are queued, with the rows of all that
                has come, and the page as it came, on the device.
            write_beside: called with the rows, on the device, when they have K and V.
            look_up_peer: asks where the peer is now, on a thread, if nobody is there.
        """
        self.failure: str | None = None
        self.metadata: bytes | None = None
        self._pool, self._pages = pool, pages
        self._pass_on, self._write_beside = pass_on, write_beside
        self._secret, self._hello, self._after = secret, hello, after
        self._look_up_peer = look_up_peer
        self._rows_on_host = rows
        self._rows: Tensor | None = None
        self._placed = self._refined = 0  # tokens
        self._first_parts: deque[tuple[str, Tensor]] = deque()  # with their codes
        self._placed_all: Any = None
        self._has_ended = self._is_whole = False
        self._wire: Wire | None = None
        self._arrived: queue.SimpleQueue[tuple[Page | Tail, Tensor]] = queue.SimpleQueue()
        self._being_read: deque[tuple[Any, Tensor | None]] = deque()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(peer,), daemon=True, name="arrival").start()

    def poll(self) -> Literal["coming", "here", "failed"]:
        """Put what has come into its rows; the scheduler calls this between steps."""
        if self.failure is None:
            try:
                self._place_some()
            except (WireError, ValueError) as error:
                self.fail(str(error))
        while self._being_read and _is_done(self._being_read[0][0]):
            self._let_go(self._being_read.popleft()[1])
        if self._being_read:
            return "coming"
        if self.failure is not None:
            self._drop_arrived()
            return "failed"
        return "here" if self._is_whole else "coming"

    @property
    def can_be_read(self) -> bool:
        """Whether all tokens have K and V, some of which are not refined yet."""
        has_all = self._placed == len(self._rows_on_host) and bool(self._first_parts)
        return has_all and self.failure is None and _is_done(self._placed_all)

    def fail(self, why: str) -> None:
        """Receive no more; the prefill server sees the connection end.

        It always hears which request the connection is for: otherwise it would wait for another.
        """
        with self._lock:
            if self.failure is not None or self._is_whole:
                return
            self.failure = why
            if self._wire is not None:
                self._wire.abort()

    def close(self) -> None:
        """Drop what has come of a request that SGLang has dropped; on a GPU wait for copies."""
        self.fail("dropped")
        for mark, buffer in self._being_read:
            if mark is not None:
                mark.synchronize()
            self._let_go(buffer)
        self._being_read.clear()
        self._drop_arrived()

    def _place_some(self) -> None:
        for _ in range(PAGES_A_POLL):
            try:
                frame, buffer = self._arrived.get_nowait()
            except queue.Empty:
                break
            is_kept = isinstance(frame, Page) and frame.part == "first"
            lent = buffer[:0].clone() if is_kept else buffer
            self._being_read.append((None, lent))  # it is given back whatever happens
            self._being_read[-1] = self._place(frame, buffer), lent
        if self._has_ended and not self._is_whole and self._arrived.empty():
            self._finish()

    def _place(self, frame: Page | Tail, buffer: Tensor) -> Any:
        """Write tokens to their rows; returns the event behind that."""
        pool = self._pool
        if isinstance(frame, Page):
            codec, count = pool.codec(frame.codes), PAGE_TOKENS
            part, size = frame.part, codec.part_bytes[frame.part]
        else:
            codec, count, part = None, frame.tokens, "whole"
            size = count * pool.token_bytes
        stop = count + (self._refined if part == "rest" else self._placed)
        if stop > len(self._rows_on_host) or (part == "rest" and not self._first_parts):
            raise WireError(f"more than the {len(self._rows_on_host)} tokens come")
        if frame.bytes != size:
            raise WireError(f"{count} tokens come in {frame.bytes} bytes, not {size}")
        come = self._rows_on_device()[:stop]
        with pool.aside(self._after):
            packed = buffer[:size].to(pool.device, non_blocking=True)
            if codec is None or isinstance(frame, Tail):
                pool.put_raw(packed, come[-count:])
            else:
                packed = self._joined(codec, frame, packed, buffer[:size])
                codec.decode(packed, come[-count:])
                if part != "first":
                    self._pass_on(come, codec, packed)
            mark = pool.mark()
        if part == "rest":
            self._refined = stop
        else:
            self._placed, self._placed_all = stop, mark
        return mark

    def _joined(self, codec: PageCodec, frame: Page, came: Tensor, on_host: Tensor) -> Tensor:
        """Return a packed page of what has come of it; the first part stays on the host."""
        if frame.part == "whole":
            return came
        if frame.part == "first":
            self._first_parts.append((frame.codes, on_host))
            return codec.join(came, None)
        codes, first = self._first_parts.popleft()
        if codes != frame.codes:
            raise WireError(f"the rest of a page of {codes} comes as {frame.codes}")
        return codec.join(first.to(came.device, non_blocking=True), came)

    def _finish(self) -> None:
        if self.metadata is None:
            raise WireError("no metadata came")
        if self._placed != len(self._rows_on_host):
            raise WireError(f"{self._placed} of {len(self._rows_on_host)} tokens came")
        if self._first_parts:
            raise WireError(f"the rest of {len(self._first_parts)} pages did not come")
        with self._pool.aside(self._after):
            self._write_beside(self._rows_on_device())
            self._being_read.append((self._pool.mark(), None))
        self._is_whole = True

    def _rows_on_device(self) -> Tensor:
        if self._rows is None:
            with self._pool.aside(self._after):
                self._rows = self._pool.rows_on_device(self._rows_on_host)
        return self._rows

    def _let_go(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            self._pages.give_back(buffer)

    def _drop_arrived(self) -> None:
        self._first_parts.clear()
        with self._lock:
            while not self._arrived.empty():
                self._let_go(self._arrived.get_nowait()[1])

    # What the thread does.

    def _run(self, peer: tuple[str, int]) -> None:
        wire = None
        try:
            self._pool.enter_thread()
            wire = Wire(self._connect(peer))
            wire.greet(self._secret, self._hello)
            with self._lock:
                self._wire = wire
            self._receive_all(wire)
        except (WireError, OSError) as error:
            self.fail(f"prefill server {peer[0]}:{peer[1]}: {error}")
        except Exception as error:
            logger.exception("cache rank: a transfer failed")
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            if wire is not None:
                wire.close()

    def _connect(self, peer: tuple[str, int]) -> socket.socket:
        """Connect; a prefill server that has been started again listens on another port."""
        try:
            return socket.create_connection(peer, SILENCE_SECONDS)
        except OSError:
            now = self._look_up_peer()
            if now is None or now == peer:
                raise
            return socket.create_connection(now, SILENCE_SECONDS)

    def _receive_all(self, wire: Wire) -> None:
        most = PAGE_TOKENS * self._pool.token_bytes
        while self.failure is None:
            frame = wire.receive()
            if isinstance(frame, Alive):
                continue
            if isinstance(frame, End):
                wire.acknowledge()
                self._has_ended = True
                return
            if isinstance(frame, Metadata):
                if frame.bytes != sum(self._hello.metadata_bytes):
                    raise WireError(f"{frame.bytes} bytes of metadata come")
                metadata = bytearray(frame.bytes)
                wire.receive_into(memoryview(metadata))
                self.metadata = bytes(metadata)
                continue
            if not 0 < frame.bytes <= most:
                raise WireError(f"{frame.bytes} bytes come at once")
            buffer = self._pages.take(frame.bytes, SILENCE_SECONDS)
            if buffer is None:
                raise WireError("no host memory is free")
            try:
                wire.receive_into(memory_of(buffer)[: frame.bytes])
            except WireError:
                self._pages.give_back(buffer)
                raise
            with self._lock:
                if self.failure is not None:
                    self._pages.give_back(buffer)
                else:
                    self._arrived.put((frame, buffer))


def _is_done(mark: Any) -> bool:
    return mark is None or bool(mark.query())
