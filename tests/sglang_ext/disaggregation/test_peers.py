"""A peer that is a stranger, breaks the protocol or is silent ends one transfer at most."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest
from both_ends import METADATA, SECRET, Servers, draw_rows, ends, make_pool, sent_in_chunks
from waiting import wait_until

from sglang_ext.disaggregation import departing, wire
from sglang_ext.disaggregation.wire import (
    SECRET_VARIABLE,
    Alive,
    Hello,
    Tail,
    Wire,
    WireError,
    link_of_environment,
    secret_of_environment,
)


def test_a_wrong_secret_is_refused_by_both(servers: Servers) -> None:
    rows = draw_rows(10, 0)
    arrival = servers.arrive(1, rows, b"t" * 64)
    ends(arrival, "failed")
    assert "closed" in str(arrival.failure) or "gone" in str(arrival.failure)
    assert servers.listener.take(1) is None


def test_a_prefill_server_that_does_not_know_the_secret_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        honest = Wire(socket.create_connection(listening.getsockname()))
        impostor = Wire(listening.accept()[0])

    def pretend() -> None:
        number = impostor.challenge()
        impostor._receive_bytes(32)
        impostor._receive_text()
        impostor.answer(b"t" * 64, number, b"", wire.Answer())

    threading.Thread(target=pretend).start()
    hello = Hello(1, 2, make_pool(0).shape, [])
    with pytest.raises(WireError, match=f"does not know our {SECRET_VARIABLE}"):
        honest.greet(SECRET, hello)


def test_a_prefill_server_that_is_started_again_is_found(servers: Servers) -> None:
    """It is looked up once, and where it was, if it is not found or not there either."""
    now = servers.peer
    with socket.create_server(("127.0.0.1", 0)) as before:
        servers.peer = before.getsockname()
    servers.asked_again.append(now)
    rows = draw_rows(300, 3)
    departure, arrival = servers.begin(1, rows)
    departure.send(rows, [], METADATA)
    ends(arrival, "here")
    for found in (None, servers.peer):
        servers.asked_again.append(found)
        arrival = servers.arrive(2, rows)
        ends(arrival, "failed")
        assert "refused" in str(arrival.failure)
        assert not servers.asked_again


def test_a_refusal_says_why(servers: Servers) -> None:
    servers.listener.why_not = lambda hello: f"room {hello.room} is not ours"
    arrival = servers.arrive(3, draw_rows(5, 0))
    ends(arrival, "failed")
    assert "the prefill server refuses: room 3 is not ours" in str(arrival.failure)
    refused = [servers.listener.why_refused(3) for _ in range(2)]
    assert refused == ["room 3 is not ours", None]


def send_metadata_and_end(one: Wire) -> None:
    one.send(wire.Metadata(48), memoryview(METADATA), link_of_environment())
    one.send(wire.End(), None, link_of_environment())


@pytest.mark.parametrize(
    ("send", "why"),
    [
        (
            lambda one: one.send(Tail(9, 9), memoryview(bytes(9)), link_of_environment()),
            "9 tokens come in 9",
        ),
        (lambda one: one.send(Tail(9, 1 << 40), None, link_of_environment()), "bytes come at once"),
        (
            lambda one: one.send(wire.Page("none", 9), memoryview(bytes(9)), link_of_environment()),
            "unknown",
        ),
        (send_metadata_and_end, "0 of 600 tokens came"),
        (lambda one: one.send(wire.End(), None, link_of_environment()), "no metadata came"),
        (
            lambda one: one.send(wire.Metadata(8), memoryview(bytes(8)), link_of_environment()),
            "8 bytes of meta",
        ),
        (
            lambda one: one.send(
                wire.Page("lynx", 9, "rest"), memoryview(bytes(9)), link_of_environment()
            ),
            "more",
        ),
        (lambda one: one._socket.sendall(b"\x05\0\0\0hello"), "no message"),
        (lambda one: one._socket.sendall(b"\xff" * 9), "header of 4294967295 bytes"),
        (lambda one: one.abort(), "closed"),
    ],
)
def test_what_must_not_come_ends_the_transfer(
    servers: Servers, send: Callable[[Wire], None], why: str
) -> None:
    departure, arrival = servers.begin(1, draw_rows(600, 7))

    def try_to() -> None:
        with contextlib.suppress(AssertionError, WireError):
            send(departure._wire)

    threading.Thread(target=try_to).start()
    ends(arrival, "failed")
    assert why in str(arrival.failure)
    departure.fail("done")


def test_a_silent_peer_is_given_up(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(departing, "ALIVE_SECONDS", 60.0)
    departure, arrival = servers.begin(1, draw_rows(600, 7))
    since = time.monotonic()
    ends(arrival, "failed", 5)
    assert time.monotonic() - since > 0.5
    departure.fail("done")


def test_connections_that_no_request_wants_are_dropped(servers: Servers) -> None:
    arrival = servers.arrive(9, draw_rows(5, 0))
    wait_until(lambda: 9 in servers.listener._waiting, 5)
    servers.listener.drop_unclaimed(60)
    assert arrival.poll() == "coming"
    servers.listener.drop_unclaimed(0)
    ends(arrival, "failed")


def test_both_servers_are_given_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "short"):
        monkeypatch.setenv(SECRET_VARIABLE, text)
        with pytest.raises(ValueError, match="at least 16 characters"):
            secret_of_environment()
    monkeypatch.setenv(SECRET_VARIABLE, "x" * 16)
    assert len(secret_of_environment()) == 64


def test_frames_without_payload_are_not_waited_for(servers: Servers) -> None:
    departure, arrival = servers.begin(1, draw_rows(5, 0))
    for _ in range(3):
        departure._wire.send(Alive(), None, link_of_environment())
    sent_in_chunks(departure, draw_rows(5, 1))
    ends(arrival, "here")
