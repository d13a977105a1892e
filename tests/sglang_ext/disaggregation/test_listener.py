"""The listener of a prefill server goes on, whoever comes and whatever does not start."""

from __future__ import annotations

import socket
import threading

import pytest
from waiting import wait_until

from sglang_ext.disaggregation import departing, wire
from sglang_ext.disaggregation.departing import Listener


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener("127.0.0.1", b"known to both")


def test_a_peer_that_sends_a_byte_at_a_time_is_given_up(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.5)
    with socket.create_connection((listener.address, listener.port)) as peer:
        peer.settimeout(0.1)

        def is_ended() -> bool:
            try:
                peer.send(b"x")
                return peer.recv(1024) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_until(is_ended, 5)


def test_the_listener_outlives_a_thread_that_does_not_start(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    address = listener.address, listener.port
    with monkeypatch.context() as patch, socket.create_connection(address) as first:
        first.settimeout(5)
        assert first.recv(1024)
        patch.setattr(departing.threading.Thread, "start", refuse)
        with socket.create_connection(address) as peer:
            peer.settimeout(5)
            assert peer.recv(1024) == b""
    with socket.create_connection(address) as peer:
        peer.settimeout(5)
        assert peer.recv(1024)
