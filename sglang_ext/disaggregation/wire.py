"""A connection that brings K and V of one prompt: how it begins, and what travels on it.

The decode server connects. Both ends prove that they know a secret, over numbers that each has
drawn for this connection. Then the prefill server sends frames: a small typed header, and behind it
as many raw bytes as it says. Nothing is encrypted, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import secrets
import socket
import struct
import time
from typing import Any, Literal, TypeVar

import msgspec

from cache_rank.channels.rate import RateLimit

SECRET_VARIABLE = "CACHE_RANK_TRANSFER_SECRET"
"""Both servers are given the same text by this variable."""

LEAST_SECRET = 16
"""A secret has at least so many characters."""

SILENCE_SECONDS = 10.0
"""A peer is gone that sends nothing, or reads nothing, for so long."""

ALIVE_SECONDS = 1.0
"""A prefill server that has nothing to send yet says that often that it is there."""

_CATCH_UP_SECONDS = 0.01
"""A link is not idle while the next page is encoded."""

_VERSION = 2
_NUMBER_BYTES = _TAG_BYTES = 32
_MOST_HEADER_BYTES = 1 << 16
_LEAST_SLICE_BYTES = 1 << 20
_SLICE_SECONDS = 0.02
_TIMEVAL = struct.Struct("@ll")
_LENGTH = struct.Struct("<I")


Part = Literal["whole", "first", "rest"]
"""Of a page: all of it, what can be read by itself, or what refines that."""


class WireError(RuntimeError):
    """The peer is gone, is not who it should be, or sends what it should not."""


class TokenShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The K and V of a token, as both servers hold them."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a decode server wants.

    Attributes:
        room: SGLang's number of the request.
        tokens: how many it has rows for.
        metadata_bytes: sizes of the parts of SGLang's metadata of a request.
        in_parts: whether pages come so that all can be read early, and what refines them behind.
    """

    room: int
    tokens: int
    shape: TokenShape
    metadata_bytes: list[int]
    in_parts: bool = False
    version: int = _VERSION


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the prefill server says to it: why it refuses, or nothing."""

    refused: str | None = None


class Page(msgspec.Struct, frozen=True, tag="page"):
    """The next PAGE_TOKENS tokens of which this part is missing come; see `PageCodec`."""

    codes: str
    bytes: int
    part: Part = "whole"


class Tail(msgspec.Struct, frozen=True, tag="tail"):
    """The last tokens come, which fill no page, as they are: (2, layers, n, Hkv, D)."""

    tokens: int
    bytes: int


class Metadata(msgspec.Struct, frozen=True, tag="metadata"):
    """SGLang's metadata of the request comes, with its first token."""

    bytes: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """All has come."""

    bytes: int = 0


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """There is nothing to send yet."""

    bytes: int = 0


Frame = Page | Tail | Metadata | End | Alive
Message = TypeVar("Message")


def secret_of_environment() -> bytes:
    """The key that the secret of both servers gives.

    Raises:
        ValueError: there is none, or it is short.
    """
    text = os.environ.get(SECRET_VARIABLE, "")
    if len(text) < LEAST_SECRET:
        raise ValueError(f"{SECRET_VARIABLE} must have at least {LEAST_SECRET} characters")
    return hashlib.blake2b(text.encode()).digest()


def link_of_environment() -> RateLimit:
    """The link that all connections of a process share, as fast as the environment says."""
    return RateLimit.of_environment(_CATCH_UP_SECONDS)


class Wire:
    """One end of a connection.

    The peer may be silent for SILENCE_SECONDS, and has as long for all that it says in a handshake.
    """

    def __init__(self, connected: socket.socket) -> None:
        # The system's deadlines: with Python's, each piece that comes would wait for Python's lock.
        connected.settimeout(None)
        deadline = _TIMEVAL.pack(*map(int, divmod(SILENCE_SECONDS * 1e6, 1e6)))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._until = time.monotonic() + SILENCE_SECONDS  # for the handshake
        self._frames = msgspec.msgpack.Decoder(Frame)
        self.sent_bytes = 0

    def send(self, frame: Frame, payload: memoryview | None, link: RateLimit) -> None:
        """Send a frame, at the rate of the link.

        Raises:
            WireError: the peer is gone.
        """
        with _wire_errors():
            self._send_text(msgspec.msgpack.encode(frame))
            size = max(_LEAST_SLICE_BYTES, link.bytes_in(_SLICE_SECONDS))
            for start in range(0, frame.bytes, size):
                assert payload is not None
                part = payload[start : min(start + size, frame.bytes)]
                link.wait(len(part))
                self._socket.sendall(part)
        self.sent_bytes += frame.bytes

    def receive(self) -> Frame:
        """Receive the header of the next frame; `receive_into` takes what is behind it."""
        return self._decode(self._frames)

    def receive_into(self, target: memoryview) -> None:
        """Receive so many bytes."""
        with _wire_errors():
            while len(target):
                if time.monotonic() > self._until:
                    raise WireError("the peer is too slow")
                if not (count := self._socket.recv_into(target, 0, socket.MSG_WAITALL)):
                    raise WireError("the peer has closed the connection")
                target = target[count:]

    def acknowledge(self) -> None:
        """Tell the prefill server that all has come."""
        with _wire_errors():
            self._socket.sendall(b"\0")

    def wait_acknowledged(self) -> None:
        self._receive_bytes(1)

    def abort(self) -> None:
        """End the connection; a thread that waits on it goes on with an error, and closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def greet(self, secret: bytes, hello: Hello) -> None:
        """Begin as the decode server.

        Raises:
            WireError: the peer refuses, or does not know the secret.
        """
        theirs, ours = self._receive_bytes(_NUMBER_BYTES), secrets.token_bytes(_NUMBER_BYTES)
        text = msgspec.msgpack.encode(hello)
        with _wire_errors():
            self._socket.sendall(ours)
            self._send_text(text)
            self._socket.sendall(_tag(secret, b"decode", theirs, ours, text))
        tag, text = self._receive_bytes(_TAG_BYTES), self._receive_text()
        self._until = math.inf
        if not hmac.compare_digest(tag, _tag(secret, b"prefill", theirs, ours, text)):
            raise WireError(f"the prefill server does not know our {SECRET_VARIABLE}")
        answer = _decoded(msgspec.msgpack.Decoder(Answer), text)
        if answer.refused is not None:
            raise WireError(f"the prefill server refuses: {answer.refused}")

    def challenge(self) -> bytes:
        """Begin as the prefill server; returns the number that its peer must have answered."""
        number = secrets.token_bytes(_NUMBER_BYTES)
        with _wire_errors():
            self._socket.sendall(number)
        return number

    def hear(self, secret: bytes, number: bytes) -> tuple[Hello, bytes]:
        """Return what a decode server wants, and its number.

        Raises:
            WireError: it does not know the secret.
        """
        theirs = self._receive_bytes(_NUMBER_BYTES)
        text, tag = self._receive_text(), self._receive_bytes(_TAG_BYTES)
        self._until = math.inf
        if not hmac.compare_digest(tag, _tag(secret, b"decode", number, theirs, text)):
            raise WireError(f"a decode server does not know our {SECRET_VARIABLE}")
        return _decoded(msgspec.msgpack.Decoder(Hello), text), theirs

    def answer(self, secret: bytes, number: bytes, theirs: bytes, answer: Answer) -> None:
        text = msgspec.msgpack.encode(answer)
        with _wire_errors():
            self._socket.sendall(_tag(secret, b"prefill", number, theirs, text))
            self._send_text(text)

    def _send_text(self, text: bytes) -> None:
        self._socket.sendall(_LENGTH.pack(len(text)) + text)

    def _receive_text(self) -> bytes:
        (length,) = _LENGTH.unpack(self._receive_bytes(_LENGTH.size))
        if length > _MOST_HEADER_BYTES:
            raise WireError(f"a header of {length} bytes is refused")
        return self._receive_bytes(length)

    def _receive_bytes(self, count: int) -> bytes:
        received = bytearray(count)
        self.receive_into(memoryview(received))
        return bytes(received)

    def _decode(self, decoder: Any) -> Any:
        return _decoded(decoder, self._receive_text())


@contextlib.contextmanager
def _wire_errors() -> Any:
    try:
        yield
    except BlockingIOError as error:
        raise WireError("the peer is silent") from error
    except OSError as error:
        raise WireError(f"the peer is gone: {error}") from error


def _decoded(decoder: msgspec.msgpack.Decoder[Message], text: bytes) -> Message:
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as error:
        raise WireError(f"the peer sends what is no message: {error}") from error


def _tag(secret: bytes, side: bytes, of_prefill: bytes, of_decode: bytes, text: bytes) -> bytes:
    digest = hashlib.blake2b(side, key=secret, digest_size=_TAG_BYTES)
    for part in (of_prefill, of_decode, text):
        digest.update(part)
    return digest.digest()
