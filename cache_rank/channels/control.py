"""The control channel: authenticated, ordered, typed messages over ZMQ.

A frame is `magic | version | sequence | tag | payload`: the tag is a keyed hash of all the rest
under the secret of this launch, the sequence number only grows, and the payload is msgpack that
must decode to one of the message types of the protocol. A frame that fails any of these is refused,
counted and logged, and changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from cache_rank.protocol import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

MAX_FRAME_BYTES = 1 << 24
"""Longer frames are refused. A step of 4096 rows is about 80 KB."""

_MAGIC = b"CRNK"
_HEAD = struct.Struct("<4sHQ")
_TAG_BYTES = 16


class ControlError(RuntimeError):
    """The peer cannot be reached: its queue is full or its socket closed."""


class RefusedFrameError(ValueError):
    """A frame that must not be acted upon."""


def seal(secret: bytes, sequence: int, payload: bytes) -> bytes:
    head = _HEAD.pack(_MAGIC, PROTOCOL_VERSION, sequence)
    return head + _tag(secret, head, payload) + payload


def unseal(secret: bytes, last_sequence: int, frame: bytes) -> tuple[int, bytes]:
    """Check a frame and return its sequence number and payload.

    Raises:
        RefusedFrameError: it is too long, malformed, of another version, unauthenticated or
            replayed.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise RefusedFrameError(f"oversized: {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    if len(frame) < _HEAD.size + _TAG_BYTES:
        raise RefusedFrameError(f"truncated: {len(frame)} bytes")
    head, tag = frame[: _HEAD.size], frame[_HEAD.size : _HEAD.size + _TAG_BYTES]
    payload = frame[_HEAD.size + _TAG_BYTES :]
    magic, version, sequence = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise RefusedFrameError("not a cache-rank frame")
    if version != PROTOCOL_VERSION:
        raise RefusedFrameError(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
    if not hmac.compare_digest(tag, _tag(secret, head, payload)):
        raise RefusedFrameError("wrong secret")
    if sequence <= last_sequence:
        raise RefusedFrameError(f"replayed: sequence {sequence} after {last_sequence}")
    return sequence, payload


def _tag(secret: bytes, head: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(head, key=secret, digest_size=_TAG_BYTES)
    digest.update(payload)
    return digest.digest()


class ControlSender:
    """Sends messages in order; never blocks."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, secret: bytes) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._secret = secret
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message.

        Raises:
            ControlError: the peer has stopped reading.
        """
        self._sequence += 1
        frame = seal(self._secret, self._sequence, self._encoder.encode(message))
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise ControlError(f"control message not sent: {error}") from error

    def close(self) -> None:
        self._socket.close()


class ControlReceiver(Generic[Message]):
    """Receives the messages of one union type; refuses and counts everything else."""

    def __init__(
        self, context: zmq.Context[Any], address: str, secret: bytes, message_type: Any
    ) -> None:
        """Bind a free port of `address`."""
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        # ZMQ drops the connection of a peer that sends more; the margin lets us name and count it.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 4 * MAX_FRAME_BYTES)
        host = f"[{address}]" if ":" in address else address
        if ":" in address:
            self._socket.setsockopt(zmq.IPV6, 1)
        self.endpoint = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self.refused = 0
        self._secret = secret
        self._last_sequence = 0
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def receive(self, timeout: float) -> Message | None:
        """Return the next valid message, or None when none came within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            frame = self._socket.recv()
            try:
                sequence, payload = unseal(self._secret, self._last_sequence, frame)
                message: Message = self._decoder.decode(payload)
            except (RefusedFrameError, msgspec.DecodeError, ValueError) as error:
                self.refuse(str(error))
                if time.monotonic() >= deadline:  # a flood of bad frames must not hold us here
                    return None
                continue
            self._last_sequence = sequence
            return message
        return None

    def refuse(self, reason: str) -> None:
        """Count and log a message that must not be acted upon."""
        self.refused += 1
        if self.refused <= 10 or self.refused % 1000 == 0:
            logger.warning("refused control message %d: %s", self.refused, reason)

    def close(self) -> None:
        self._socket.close()
