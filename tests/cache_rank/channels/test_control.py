"""The control channel: what is not a genuine frame is refused, counted, and changes nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from cache_rank.channels.control import (
    MAX_FRAME_BYTES,
    ControlError,
    ControlReceiver,
    ControlSender,
    RefusedFrameError,
    seal,
    unseal,
)
from cache_rank.protocol import PROTOCOL_VERSION, End, Flush, Load, Row, Step, ToCacheRank

SECRET = b"the secret of this launch"
OTHER_SECRET = b"the secret of another launch"
HEAD_AND_TAG_BYTES = len(seal(SECRET, 1, b""))
VERSION_OFFSET = len(b"CRNK")

payloads = st.binary(max_size=200)
sequences = st.integers(1, 2**64 - 1)


@given(payloads, sequences, st.data())
def test_unseal_returns_what_was_sealed(payload: bytes, sequence: int, data: st.DataObject) -> None:
    last = data.draw(st.integers(0, sequence - 1))
    assert unseal(SECRET, last, seal(SECRET, sequence, payload)) == (sequence, payload)


@given(payloads, sequences)
def test_a_flipped_bit_in_any_byte_is_refused(payload: bytes, sequence: int) -> None:
    frame = seal(SECRET, sequence, payload)
    for place in range(len(frame)):
        damaged = bytearray(frame)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(RefusedFrameError):
            unseal(SECRET, 0, bytes(damaged))


@given(payloads, st.binary(min_size=1, max_size=20), st.data())
def test_a_frame_cut_short_or_extended_is_refused(
    payload: bytes, more: bytes, data: st.DataObject
) -> None:
    frame = seal(SECRET, 1, payload)
    kept = data.draw(st.integers(0, len(frame) - 1))
    for damaged in (frame[:kept], frame + more):
        with pytest.raises(RefusedFrameError):
            unseal(SECRET, 0, damaged)


@given(sequences, st.data())
def test_a_sequence_number_that_does_not_grow_is_refused(
    sequence: int, data: st.DataObject
) -> None:
    last = data.draw(st.integers(sequence, 2**64 - 1))
    with pytest.raises(RefusedFrameError, match=f"replayed: sequence {sequence} after {last}"):
        unseal(SECRET, last, seal(SECRET, sequence, b"payload"))


def test_another_protocol_version_is_refused_by_number() -> None:
    frame = bytearray(seal(SECRET, 1, b"payload"))
    frame[VERSION_OFFSET] += 1
    message = f"version {PROTOCOL_VERSION + 1}, this side speaks {PROTOCOL_VERSION}"
    with pytest.raises(RefusedFrameError, match=message):
        unseal(SECRET, 0, bytes(frame))


def test_the_largest_frame_passes_and_one_byte_more_is_refused() -> None:
    payload = bytes(MAX_FRAME_BYTES - HEAD_AND_TAG_BYTES)
    assert unseal(SECRET, 0, seal(SECRET, 1, payload)) == (1, payload)
    with pytest.raises(RefusedFrameError, match=f"oversized: {MAX_FRAME_BYTES + 1} bytes"):
        unseal(SECRET, 0, seal(SECRET, 1, payload + b"x"))


@dataclass(frozen=True)
class Channel:
    """A receiver, its genuine sender, and a raw socket connected to the same endpoint."""

    context: zmq.Context[Any]
    receiver: ControlReceiver[Any]
    sender: ControlSender
    stranger: zmq.Socket[Any]

    def receive(self) -> msgspec.Struct | None:
        return self.receiver.receive(timeout=10.0)

    def expect_refused(self, count: int) -> None:
        """Receive until so many frames were refused, and no message among them."""
        deadline = time.monotonic() + 10
        while self.receiver.refused < count and time.monotonic() < deadline:
            assert self.receiver.receive(timeout=0.05) is None
        assert self.receiver.refused == count


@pytest.fixture
def channel() -> Iterator[Channel]:
    context: zmq.Context[Any] = zmq.Context()
    receiver: ControlReceiver[Any] = ControlReceiver(context, "127.0.0.1", SECRET, ToCacheRank)
    sender = ControlSender(context, receiver.endpoint, SECRET)
    stranger = context.socket(zmq.PUSH)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(receiver.endpoint)
    yield Channel(context, receiver, sender, stranger)
    stranger.close()
    sender.close()
    receiver.close()
    context.term()


MESSAGES = (
    Load(sequence_id=1, start=0, count=100),
    Step(step=1, rows=[Row(1, 100), Row(2**40, 0)]),
    End(sequence_ids=[1, 2, 3]),
    Flush(),
)


def test_messages_arrive_in_order_and_typed(channel: Channel) -> None:
    for message in MESSAGES:
        channel.sender.send(message)
    assert tuple(channel.receive() for _ in MESSAGES) == MESSAGES
    assert channel.receiver.refused == 0


def test_a_step_of_4096_rows_fits_a_frame(channel: Channel) -> None:
    step = Step(step=2**40, rows=[Row(2**40 + row, 2**20 + row) for row in range(4096)])
    channel.sender.send(step)
    assert channel.receive() == step


def test_receive_returns_none_when_nothing_came(channel: Channel) -> None:
    started = time.monotonic()
    assert channel.receiver.receive(timeout=0.2) is None
    assert 0.15 < time.monotonic() - started < 5


def sealed(payload: bytes, sequence: int = 1, secret: bytes = SECRET) -> bytes:
    return seal(secret, sequence, payload)


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


BAD_FRAMES = {
    "empty": b"",
    "foreign secret": sealed(packed(Flush()), secret=OTHER_SECRET),
    "other magic": b"HTTP" + sealed(packed(Flush()))[4:],
    "sequence zero": sealed(packed(Flush()), sequence=0),
    "oversized": sealed(bytes(MAX_FRAME_BYTES)),
    "not msgpack": sealed(b"\xc1", sequence=1000),
    "no payload": sealed(b""),
    "untyped": sealed(packed([1, 2, 3])),
    "unknown type": sealed(packed({"type": "Reboot"})),
    "unknown field": sealed(packed({"type": "Flush", "now": True})),
    "missing field": sealed(packed({"type": "Load", "sequence_id": 1})),
    "wrong type of field": sealed(packed({"type": "End", "sequence_ids": "all"})),
    "message of the other side": sealed(packed({"type": "Ready"})),
}


def test_bad_frames_are_counted_and_the_good_sender_still_gets_through(channel: Channel) -> None:
    """One that says nothing does not use up its sequence number."""
    for count, frame in enumerate(BAD_FRAMES.values(), start=1):
        channel.stranger.send(frame)
        channel.expect_refused(count)
    channel.sender.send(Flush())
    assert channel.receive() == Flush()
    assert channel.receiver.refused == len(BAD_FRAMES)


def test_a_replayed_frame_is_counted_and_acted_upon_once(channel: Channel) -> None:
    frame = sealed(packed(Flush()))
    channel.stranger.send(frame)
    assert channel.receive() == Flush()
    channel.stranger.send(frame)
    channel.expect_refused(1)


def test_a_frame_beyond_the_socket_limit_cuts_off_only_its_sender(channel: Channel) -> None:
    channel.stranger.send(bytes(4 * MAX_FRAME_BYTES + 1))
    assert channel.receiver.receive(timeout=0.2) is None
    for message in MESSAGES:
        channel.sender.send(message)
    assert tuple(channel.receive() for _ in MESSAGES) == MESSAGES


def test_bytes_that_are_not_zmq_are_survived(channel: Channel) -> None:
    host, port = channel.receiver.endpoint.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    channel.sender.send(Flush())
    assert channel.receive() == Flush()


def test_a_flood_of_bad_frames_does_not_hold_the_receiver(channel: Channel) -> None:
    """The process reports, and the supervisor looks for its heartbeat, between two receives."""
    channel.stranger.send(b"x")
    channel.expect_refused(1)  # it is connected
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            channel.stranger.send(b"x", zmq.DONTWAIT)
            time.sleep(0.01)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        begin = time.monotonic()
        assert channel.receiver.receive(timeout=0.3) is None
        assert time.monotonic() - begin < 3
        assert channel.receiver.refused > 1
    finally:
        # A receiver that never returns would otherwise hang the test.
        over.set()
        thread.join()


def test_a_sender_raises_and_does_not_block_once_its_queue_is_full(channel: Channel) -> None:
    endpoint = channel.receiver.endpoint
    channel.receiver.close()
    sender = ControlSender(channel.context, endpoint, SECRET)

    def send_for_ever() -> None:
        while True:
            sender.send(Flush())

    with pytest.raises(ControlError, match="not sent"):
        send_for_ever()
    sender.close()
    with pytest.raises(ControlError, match="not sent"):
        sender.send(Flush())
