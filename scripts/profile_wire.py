"""Time the answers of a decode step between two GPUs, by what carries them.

    python -m scripts.profile_wire [--batches 8 16] [--channels 2 4 8] [--json FILE]

Copies into the peer's memory, and NCCL by how many channels it may use. Answers have the size that
they have in a step, and are sent one after the other while nothing else runs: what a step needs for
its transfers at the least. NCCL reads its settings once, so every line is measured by two processes
of its own. `NCCL_MAX_P2P_NCHANNELS` sets the channels of a server.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from cache_rank.channels.nccl import NcclChannel, prepare_environment, unique_id
from cache_rank.channels.peer import PeerChannel
from cache_rank.channels.transport import CACHE, INFERENCE
from cache_rank.config import CacheRankConfig, WireDtype
from cache_rank.protocol import DownMessage, group_sizes
from scripts.shared.models import model_config, model_shape
from scripts.shared.report import table

LOOPBACK = "127.0.0.1"
SECONDS = 60.0
"""That two processes may take for all batches."""
REPEATS = 10


class Wire(NamedTuple):
    """One line.

    Attributes:
        channels: that NCCL may use; 0 for copies into the peer's memory.
        batch: requests of a step.
        message_bytes: of the answer of a layer group.
        message_us: median time of one.
        step_us: median time of one for every layer group.
    """

    channels: int
    batch: int
    message_bytes: int
    message_us: float
    step_us: float


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.profile_wire",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="qwen3-8b", help="as of profile_tpot")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16], help="requests a step")
    parser.add_argument("--channels", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--wire-dtype", default="bf16", choices=get_args(WireDtype))
    parser.add_argument("--layers-per-group", type=int, default=6)
    parser.add_argument("--delta-capacity", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if torch.cuda.device_count() < 2:
        parser.error(f"needs two GPUs, found {torch.cuda.device_count()}")
    config = CacheRankConfig(
        model_shape(model_config(args.model)),
        layers_per_group=args.layers_per_group,
        delta_capacity=args.delta_capacity,
        wire_dtype=args.wire_dtype,
    )
    messages = {batch: tuple(group_sizes(DownMessage, config, batch)) for batch in args.batches}
    wires = [wire for channels in (0, *args.channels) for wire in measure(channels, messages)]
    header = ("carried by", "batch", "MB a group", "group µs", "step ms", "GB/s")
    rows = [
        (
            f"NCCL, {wire.channels} channels" if wire.channels else "peer copies",
            *(str(wire.batch), f"{wire.message_bytes / 1e6:.1f}"),
            *(f"{wire.message_us:.0f}", f"{wire.step_us / 1e3:.2f}"),
            f"{sum(messages[wire.batch]) / wire.step_us / 1e3:.0f}",
        )
        for wire in wires
    ]
    print(table(header, rows))
    if args.json:
        args.json.write_text(json.dumps([wire._asdict() for wire in wires], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
