"""The channels between an inference rank and its cache rank.

Three, so that none waits behind another: `up` carries what a step computes, `down` the answers,
`bulk` whole prompts and weights, and the pages of prompts that come back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
from collections.abc import Iterator
from typing import Any, Literal

import torch

from cache_rank.channels.gloo import GlooChannel
from cache_rank.channels.nccl import NcclChannel, unique_id
from cache_rank.channels.peer import PeerChannel
from cache_rank.channels.transport import CACHE, INFERENCE, Channel
from cache_rank.config import CacheRankConfig
from cache_rank.protocol import down_sizes, up_sizes

TransferBackend = Literal["gloo", "peer", "nccl"]
"""Steps travel by gloo between CPUs, and by copies into the peer's memory or NCCL between GPUs."""

logger = logging.getLogger(__name__)

ABORT_SECONDS = 10.0
"""An abort of a channel is given this time; the caller goes on afterwards."""


class Link:
    """The channels between an inference rank and its cache rank.

    Attributes:
        up, down, bulk: see the module. `up` has a buffer for each layer message, `down` for each
            layer group.
        buffers: memory for what this rank receives in a step, (bytes,) uint8 each.
    """

    NAMES = ("up", "down", "bulk")

    def __init__(
        self,
        config: CacheRankConfig,
        rendezvous: dict[str, bytes],
        rank: int,
        device: torch.device,
        address: str,
        secret: bytes,
        timeout: float,
    ) -> None:
        """Connect all channels; both sides call this at about the same time.

        `rendezvous` is from `make_rendezvous`, and `rank` is INFERENCE or CACHE. Channels bind to
        the interface of `address`, and each proves that both ends know the secret.

        Raises:
            TransportError: the peer did not appear in `timeout` seconds, or does not know the
                secret.
        """
        self._on_gpu = device.type == "cuda"
        channels: dict[str, Any] = {}
        with contextlib.ExitStack() as on_failure:

            def formed(name: str, channel: Channel) -> None:
                channels[name] = channel
                on_failure.callback(_undo, channel)

            for name, meeting in rendezvous.items():
                if self._on_gpu:
                    formed(name, NcclChannel(name, meeting, rank, device, timeout))
                else:
                    path = meeting.decode()
                    formed(name, GlooChannel(path, name, rank, address, secret, timeout))
            up, down = up_sizes(config, config.max_rows), down_sizes(config, config.max_rows)
            nothing: list[int] = []
            if "up" in channels:
                received = down if rank == INFERENCE else up
                self.buffers = [
                    torch.zeros(size, dtype=torch.uint8, device=device) for size in received
                ]
            else:
                exchange = functools.partial(channels["bulk"].exchange, timeout=timeout)
                for name, sizes, sender in (("up", up, INFERENCE), ("down", down, CACHE)):
                    ways = (sizes, nothing) if rank == sender else (nothing, sizes)
                    formed(name, PeerChannel(name, device, *ways, exchange))
                self.buffers = channels["down" if rank == INFERENCE else "up"].buffers
            on_failure.pop_all()
        self.up: Channel = channels["up"]
        self.down: Channel = channels["down"]
        self.bulk: Channel = channels["bulk"]
        self._bulk_stream = channels["bulk"].stream if self._on_gpu else None
        self._peer_channels = [c for c in channels.values() if isinstance(c, PeerChannel)]

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Run work queued inside on the bulk channel's stream on a GPU, beside the steps."""
        if self._bulk_stream is None:
            yield
        else:
            with torch.cuda.stream(self._bulk_stream):
                yield

    def abort(self) -> None:
        """End transfers whose peer is gone, with arbitrary contents. Safe from any thread."""
        # NCCL frees memory when a channel has ended, which waits for the transfers of all others.
        steps, bulk = [self.up, self.down], [self.bulk]
        for channels in [steps, bulk] if self._peer_channels else [steps + bulk]:
            threads = [threading.Thread(target=each.abort, daemon=True) for each in channels]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(ABORT_SECONDS)

    def finish(self) -> None:
        """Abort until nothing is under way, now that the peer has ended, or is about to."""
        self.abort()
        for channel in self._peer_channels:
            if not channel.finish(ABORT_SECONDS):
                logger.warning("transfers of a lost peer are still under way on %s", channel.name)

    def close(self) -> None:
        """Drop the channels, whose peer has ended."""
        for channel in (self.up, self.down, self.bulk):
            channel.close()


def _undo(channel: Channel) -> None:
    """Drop a channel on which nothing is under way."""
    channel.abort()
    if isinstance(channel, PeerChannel):
        channel.finish(timeout=0)


def make_rendezvous(backend: TransferBackend, folder: str) -> dict[str, bytes]:
    """Make what both ranks need to connect each channel; the inference rank makes it.

    For CPUs a file a channel, in a folder that only this user can read; for GPUs a secret of NCCL,
    which travels on the authenticated control channel. Channels that are not named copy into the
    peer's memory, and find it over `bulk`.
    """
    if backend == "gloo":
        return {name: f"{folder}/{name}-{secrets.token_hex(4)}".encode() for name in Link.NAMES}
    return {name: unique_id() for name in (Link.NAMES if backend == "nccl" else ("bulk",))}


def transfer_backend(
    wanted: Literal["auto", "peer", "nccl"], inference: torch.device, cache: torch.device
) -> TransferBackend:
    if inference.type != "cuda":
        return "gloo"
    if wanted != "auto":
        return wanted
    reaches = inference == cache or torch.cuda.can_device_access_peer(inference, cache)
    return "peer" if reaches else "nccl"
