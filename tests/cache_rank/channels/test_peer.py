"""Channels that copy into the peer's memory, between two processes on one GPU or two."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_rank.channels.peer import PeerChannel
from cache_rank.channels.transport import TransportError
from cache_rank.graphs import capture

pytestmark = pytest.mark.gpu

SIZES = [1000, 1 << 20, 256]
ROUNDS = 40
LONG = 60.0
"""Seconds that no passing test waits."""

A_WHILE = 3_000_000
"""Cycles of a GPU, more than a millisecond: far more than a copy takes."""

Form = Callable[[list[int], list[int]], PeerChannel]


def message(number: int, index: int, device: str = "cuda") -> Tensor:
    """What is sent: of another length each time, none of them nothing."""
    size = SIZES[index] - number
    return (torch.arange(size, device=device) + 7 * number + index).to(torch.uint8)


def send_rounds(form: Form, pipe: Connection) -> None:
    channel = form(SIZES, [])
    under_way = [
        channel.send(message(number, index), buffer_index=index)
        for number in range(ROUNDS)
        for index in range(len(SIZES))
    ]
    torch.cuda.synchronize()
    del under_way  # which hold what is sent
    pipe.send("sent")
    pipe.recv()


def send_graphs(form: Form, pipe: Connection) -> None:
    channel = form(SIZES, [])
    tick = torch.zeros(1, dtype=torch.uint8, device="cuda")
    sent = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in SIZES]

    def send() -> None:
        tick.add_(1)
        for index, tensor in enumerate(sent):
            tensor.copy_(tick.expand_as(tensor))
            channel.send(tensor, buffer_index=index)

    tick.copy_(tick.add(1) - 1)  # so that its kernels are loaded
    graph = capture(send, channel.stream)
    with torch.cuda.stream(channel.stream):
        for _ in range(ROUNDS):
            graph.replay()
    torch.cuda.synchronize()
    pipe.send("sent")
    pipe.recv()


def send_one_and_die(form: Form, pipe: Connection) -> None:
    channel = form(SIZES, SIZES)
    under_way = channel.send(message(0, 0)), channel.receive(channel.buffers[0])
    torch.cuda.Stream().synchronize()
    pipe.send("queued")
    pipe.recv()
    del under_way


def run_peer(
    behaviour: Callable[[Form, Connection], None], device: torch.device, pipe: Connection
) -> None:
    behaviour(former(pipe, device), pipe)


def former(pipe: Connection, device: torch.device) -> Form:
    """Forms one end, which finds the other through a pipe."""

    def exchange(given: bytes) -> bytes:
        pipe.send_bytes(given)
        return pipe.recv_bytes()

    return lambda sends, receives: PeerChannel("down", device, sends, receives, exchange)


class Peer:
    """A process that runs one behaviour at the other end of a channel."""

    def __init__(self, behaviour: Callable[[Form, Connection], None]) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self.pipe, other_end = context.Pipe()
        device = torch.device("cuda", torch.cuda.device_count() - 1)
        self.process = context.Process(target=run_peer, args=(behaviour, device, other_end))
        self.process.start()
        self.form = former(self.pipe, torch.device("cuda", 0))

    def expect(self, said: str) -> None:
        assert self.pipe.poll(LONG)
        assert self.pipe.recv() == said

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start_peer(behaviour: Callable[[Form, Connection], None]) -> Peer:
        peers.append(Peer(behaviour))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.kill()


def test_every_message_arrives_in_its_buffer_and_none_before_it_is_lent(
    start: Callable[..., Peer],
) -> None:
    channel = start(send_rounds).form([], SIZES)
    copies = []
    for number in range(ROUNDS):
        for index in range(len(SIZES)):
            size = message(number, index).numel()
            channel.receive(channel.buffers[index][:size], buffer_index=index).wait(LONG)
            # The peer has sent the next rounds by now, if it does not wait.
            torch.cuda._sleep(A_WHILE)
            copies.append((number, index, channel.buffers[index][:size].clone()))
    for number, index, copy in copies:
        assert torch.equal(copy, message(number, index)), (number, index)


def test_buffers_begin_as_zeros_of_the_sizes_asked_for(start: Callable[..., Peer]) -> None:
    channel = start(send_rounds).form([], SIZES)
    assert [buffer.numel() for buffer in channel.buffers] == SIZES
    assert not any(buffer.any() for buffer in channel.buffers)
    assert all(buffer.data_ptr() % 256 == 0 for buffer in channel.buffers)
    with pytest.raises(AssertionError, match="not the buffer"):
        channel.receive(channel.buffers[1], buffer_index=0)


def test_graphs_hold_transfers_and_keep_their_order(start: Callable[..., Peer]) -> None:
    channel = start(send_graphs).form([], SIZES)
    row = torch.zeros(1, dtype=torch.int64, device="cuda")
    seen = torch.zeros((ROUNDS, len(SIZES), 2), dtype=torch.uint8, device="cuda")
    copies = [torch.empty_like(buffer) for buffer in channel.buffers]

    def note() -> None:
        for index, copy in enumerate(copies):
            seen[:, index].index_copy_(0, row, torch.stack([copy.min(), copy.max()])[None])

    def receive() -> None:
        for index, (buffer, copy) in enumerate(zip(channel.buffers, copies, strict=True)):
            channel.receive(buffer, buffer_index=index)
            copy.copy_(buffer)

    for copy, buffer in zip(copies, channel.buffers, strict=True):
        copy.copy_(buffer)
    graph = capture(receive, channel.stream)
    with torch.cuda.stream(channel.stream):
        for _ in range(ROUNDS):
            graph.replay()
            torch.cuda._sleep(A_WHILE)
            note()
            row.add_(1)
    torch.cuda.synchronize()
    rounds = torch.arange(1, ROUNDS + 1, dtype=torch.uint8, device="cuda")
    assert torch.equal(seen, rounds[:, None, None].expand(-1, len(SIZES), 2))


def test_abort_ends_transfers_of_a_killed_peer_and_the_device_goes_on(
    start: Callable[..., Peer],
) -> None:
    peer = start(send_one_and_die)
    channel = peer.form(SIZES, SIZES)
    channel.receive(channel.buffers[0][:1000]).wait(LONG)
    assert torch.equal(channel.buffers[0], message(0, 0))
    peer.expect("queued")
    channel.receive(channel.buffers[1], buffer_index=1)  # never sent
    answer = message(0, 0)
    for _ in range(2):
        channel.send(answer, buffer_index=0)  # lent once
    peer.kill()
    assert not channel.is_idle

    channel.abort()
    torch.cuda.synchronize()  # ends without another word of the host's
    assert channel.finish(LONG)
    assert channel.finish(LONG)
    for transfer in (channel.send, channel.receive):
        with pytest.raises(TransportError, match="down is closed"):
            transfer(channel.buffers[0])
    del channel, transfer
    torch.cuda.synchronize()
    assert int(torch.ones(4, device="cuda").sum()) == 4


def test_memory_that_nobody_shares_is_refused() -> None:
    with pytest.raises(TransportError, match="cuIpcOpenMemHandle"):
        PeerChannel(
            "down", torch.device("cuda", 0), [], SIZES, lambda given: given[:40] + bytes(64)
        )
