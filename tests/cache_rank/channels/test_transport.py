"""Point-to-point channels between two processes, and what their failures look like."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import small_config
from torch import Tensor

from cache_rank.channels.link import Link, make_rendezvous, transfer_backend
from cache_rank.channels.transport import CACHE, INFERENCE, TransportError

ADDRESS = "127.0.0.1"
CPU = torch.device("cpu")
CONFIG = small_config()
SECRET = b"the secret of this launch"
CONNECT_SECONDS = 60.0
LONG = 60.0
"""A timeout that no passing test reaches."""

SOON = 10.0
"""Far below LONG, far above what noticing a closed socket takes on a busy machine."""

ROUNDS = 5
BULK_SHAPE = (2, 3, 1000, 2, 8)


def tensor_of_round(number: int) -> Tensor:
    return torch.arange(100 + number, dtype=torch.float32) * (number + 1)


def bulk_tensor() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BULK_SHAPE, generator=generator).bfloat16()


def echo(link: Link, pipe: Connection) -> None:
    """Answer each tensor with its negative, and then expect the bulk tensor."""
    for number in range(ROUNDS):
        received = torch.empty_like(tensor_of_round(number))
        link.up.receive(received).wait(LONG)
        link.down.send(-received).wait(LONG)
    shipment = torch.empty(BULK_SHAPE, dtype=torch.bfloat16)
    link.bulk.receive(shipment).wait(LONG)
    pipe.send(torch.equal(shipment, bulk_tensor()))
    pipe.recv()


def answer_down_then_bulk(link: Link, pipe: Connection) -> None:
    """Send on the bulk channel only once the answer on the down channel was seen."""
    link.down.send(tensor_of_round(0)).wait(LONG)
    pipe.recv()
    link.bulk.send(tensor_of_round(1)).wait(LONG)
    pipe.recv()


def do_nothing(link: Link, pipe: Connection) -> None:
    pipe.recv()


def run_peer(
    behaviour: Callable[[Link, Connection], None],
    rendezvous: dict[str, bytes],
    secret: bytes,
    pipe: Connection,
) -> None:
    """The cache rank's side, in a process of its own."""
    try:
        link = Link(CONFIG, rendezvous, CACHE, CPU, ADDRESS, secret, CONNECT_SECONDS)
        behaviour(link, pipe)
        link.close()
    except TransportError as error:
        pipe.send(str(error))


class Peer:
    """A process that runs one behaviour at the other end of a link."""

    def __init__(
        self,
        rendezvous: dict[str, bytes],
        behaviour: Callable[[Link, Connection], None],
        secret: bytes,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cache_rank.channels.link"])  # once for all peers
        self.rendezvous = rendezvous
        self.pipe, other_end = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=run_peer, args=(behaviour, self.rendezvous, secret, other_end), daemon=True
        )
        self.process.start()

    def connect(self) -> Link:
        return Link(CONFIG, self.rendezvous, INFERENCE, CPU, ADDRESS, SECRET, CONNECT_SECONDS)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start_peer(behaviour: Callable[[Link, Connection], None], secret: bytes = SECRET) -> Peer:
        peers.append(Peer(make_rendezvous("gloo", str(tmp_path)), behaviour, secret))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.close()


def test_tensors_cross_in_order_and_bit_for_bit(start: Callable[..., Peer]) -> None:
    peer = start(echo)
    link = peer.connect()
    for number in range(ROUNDS):
        sent = link.up.send(tensor_of_round(number))
        answer = torch.empty_like(tensor_of_round(number))
        link.down.receive(answer).wait(LONG)
        sent.wait(LONG)
        assert torch.equal(answer, -tensor_of_round(number))
    link.bulk.send(bulk_tensor()).wait(LONG)
    assert peer.pipe.poll(LONG)
    assert peer.pipe.recv() is True
    link.close()


def test_no_channel_waits_behind_another(start: Callable[..., Peer]) -> None:
    peer = start(answer_down_then_bulk)
    link = peer.connect()
    bulk, down = torch.empty_like(tensor_of_round(1)), torch.empty_like(tensor_of_round(0))
    bulk_pending = link.bulk.receive(bulk)  # posted first, answered last
    link.down.receive(down).wait(LONG)
    peer.pipe.send("seen")
    bulk_pending.wait(LONG)
    assert torch.equal(down, tensor_of_round(0))
    assert torch.equal(bulk, tensor_of_round(1))


def test_a_peer_with_another_secret_is_refused_by_both_sides(start: Callable[..., Peer]) -> None:
    peer = start(do_nothing, secret=b"the secret of another launch")
    with pytest.raises(TransportError, match="channel up"):
        peer.connect()
    assert peer.pipe.poll(LONG)
    assert "channel up" in peer.pipe.recv()


def test_a_peer_that_never_appears_is_given_up(tmp_path: Path) -> None:
    started = time.monotonic()
    meeting = make_rendezvous("gloo", str(tmp_path))
    with pytest.raises(TransportError, match="channel up"):
        Link(CONFIG, meeting, INFERENCE, CPU, ADDRESS, SECRET, 0.5)
    assert time.monotonic() - started < SOON


def test_a_killed_peer_fails_every_transfer_at_once(start: Callable[..., Peer]) -> None:
    peer = start(do_nothing)
    link = peer.connect()
    pending = link.down.receive(torch.empty(1000))
    peer.signal(signal.SIGKILL)
    peer.process.join()
    started = time.monotonic()
    with pytest.raises(TransportError, match="channel down"):
        pending.wait(LONG)
    with pytest.raises(TransportError, match="channel down"):
        link.down.receive(torch.empty(1000)).wait(LONG)
    with pytest.raises(TransportError, match="channel up"):
        link.up.send(torch.zeros(1000)).wait(LONG)
    assert time.monotonic() - started < SOON


def test_a_stopped_peer_fails_a_transfer_after_the_timeout(start: Callable[..., Peer]) -> None:
    peer = start(do_nothing)
    link = peer.connect()
    pending = link.down.receive(torch.empty(1000))
    peer.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TransportError, match="channel down"):
        pending.wait(0.5)
    assert 0.4 < time.monotonic() - started < SOON
    # Far more than the sockets buffer: a stopped peer reads none of it.
    with pytest.raises(TransportError, match="channel up"):
        link.up.send(torch.zeros(16 << 20)).wait(0.5)
    assert time.monotonic() - started < 2 * SOON


def test_every_link_meets_in_files_of_its_own(tmp_path: Path) -> None:
    made = [make_rendezvous("gloo", str(tmp_path)) for _ in range(3)]
    meetings = [meeting for rendezvous in made for meeting in rendezvous.values()]
    assert len(set(meetings)) == len(meetings) == 3 * len(Link.NAMES)
    for meeting in meetings:
        assert Path(meeting.decode()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("backend", "channels"), [("nccl", Link.NAMES), ("peer", ("bulk",))])
def test_every_nccl_channel_has_an_identity_of_its_own(
    backend: Any, channels: tuple[str, ...]
) -> None:
    rendezvous = make_rendezvous(backend, "")
    assert tuple(rendezvous) == channels
    assert {len(identity) for identity in rendezvous.values()} == {128}
    assert len(set(rendezvous.values())) == len(channels)


@pytest.mark.parametrize("ending", ["killed", "stopped"])
def test_a_link_can_be_aborted_and_closed_whatever_its_peer_does(
    start: Callable[..., Peer], ending: str
) -> None:
    peer = start(do_nothing)
    link = peer.connect()
    with link.in_background():
        pending = link.bulk.receive(torch.empty(10))
    peer.signal(signal.SIGKILL if ending == "killed" else signal.SIGSTOP)
    started = time.monotonic()
    link.abort()
    link.abort()
    with pytest.raises(TransportError, match="channel bulk"):
        pending.wait(0.5)
    link.close()
    assert time.monotonic() - started < SOON


@pytest.mark.parametrize(
    ("wanted", "reachable", "backend"),
    [
        ("auto", True, "peer"),
        ("auto", False, "nccl"),
        ("nccl", True, "nccl"),
        ("peer", True, "peer"),
    ],
)
def test_gpus_that_reach_each_other_copy_unless_nccl_is_wanted(
    wanted: Any, reachable: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reachable)
    gpus = torch.device("cuda:0"), torch.device("cuda:1")
    assert transfer_backend(wanted, *gpus) == backend
    assert transfer_backend("auto", CPU, CPU) == "gloo"
