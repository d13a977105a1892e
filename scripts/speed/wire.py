"""Times the answers of a decode step between two GPUs, each with a process of its own."""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import torch

from cache_rank.channels.nccl import NcclChannel, prepare_environment, unique_id
from cache_rank.channels.peer import PeerChannel
from cache_rank.channels.transport import CACHE, INFERENCE
from scripts.shared.report import table_of

LOOPBACK = "127.0.0.1"
SECONDS = 60.0
"""Two processes may take so long for all batches."""
REPEATS = 10


class Wire(NamedTuple):
    """One line."""

    channels: int  # channels that NCCL may use; 0 for copies into the peer's memory
    batch: int  # requests of a step
    message_bytes: int  # bytes of the answer of a layer group
    message_us: float  # median time of one
    step_us: float  # median time of one for every layer group


def measure(channels: int, messages: dict[int, tuple[int, ...]]) -> list[Wire]:
    """Time the messages, in bytes by layer group, of each batch.

    Raises:
        TimeoutError: the processes did not end in time, or one failed.
    """
    context = multiprocessing.get_context("spawn")
    identities, lines = context.Queue(), context.Queue()
    sides = [
        context.Process(target=_side, args=(rank, channels, messages, identities, lines))
        for rank in (INFERENCE, CACHE)
    ]
    for side in sides:
        side.start()
    for side in sides:
        side.join(SECONDS)
    failed = [side for side in sides if side.exitcode != 0]
    for side in failed:
        side.kill()
    if failed:
        raise TimeoutError(f"{len(failed)} of 2 processes did not end well within {SECONDS:g} s")
    return [lines.get(timeout=SECONDS) for _ in messages]


def _side(
    rank: int,
    channels: int,
    messages: dict[int, tuple[int, ...]],
    identities: Queue[bytes],
    lines: Queue[Wire],
) -> None:
    os.environ["NCCL_MAX_P2P_NCHANNELS"] = str(channels or 1)
    prepare_environment(os.environ, LOOPBACK)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.cuda.init()
    if rank == INFERENCE:
        identities.put(identity := unique_id())
    else:
        identity = identities.get(timeout=SECONDS)
    nccl = NcclChannel("bulk", identity, rank, device, SECONDS)
    channel = nccl if channels else _peer_channel(rank, device, messages, nccl)
    transfer = channel.send if rank == CACHE else channel.receive
    largest = messages[max(messages)]
    lanes = [torch.zeros(size, dtype=torch.uint8, device=device) for size in largest]
    if isinstance(channel, PeerChannel) and rank == INFERENCE:
        lanes = channel.buffers
    for batch, sizes in messages.items():
        buffers = [lane[:size] for lane, size in zip(lanes, sizes, strict=True)]
        times = {
            count: statistics.median(_time(channel, transfer, buffers[:count]))
            for count in (1, len(buffers))
        }
        if rank == CACHE:
            lines.put(Wire(channels, batch, sizes[0], times[1], times[len(buffers)]))
    channel.close()


def _peer_channel(
    rank: int, device: torch.device, messages: dict[int, tuple[int, ...]], nccl: NcclChannel
) -> PeerChannel:
    ways = [messages[max(messages)], ()]
    sends, receives = ways if rank == CACHE else reversed(ways)
    exchange = functools.partial(nccl.exchange, timeout=SECONDS)
    return PeerChannel("down", device, sends, receives, exchange)


def _time(
    channel: NcclChannel | PeerChannel, transfer: Any, buffers: Sequence[torch.Tensor]
) -> list[float]:
    """Microseconds of transferring all the buffers, several times after two that warm up."""
    times = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(channel.stream)
        for lane, buffer in enumerate(buffers):
            transfer(buffer, lane=lane)
        stop.record(channel.stream)
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return times[2:]


def markdown(wires: Sequence[Wire], messages: dict[int, tuple[int, ...]]) -> str:
    """A table of the lines."""
    return table_of(
        {
            "carried by": f"NCCL, {wire.channels} channels" if wire.channels else "peer copies",
            "batch": str(wire.batch),
            "MB a group": f"{wire.message_bytes / 1e6:.1f}",
            "group µs": f"{wire.message_us:.0f}",
            "step ms": f"{wire.step_us / 1e3:.2f}",
            "GB/s": f"{sum(messages[wire.batch]) / wire.step_us / 1e3:.0f}",
        }
        for wire in wires
    )
