"""The channels between an inference rank and its cache rank.

Three, each a two-rank group of its own so that none waits behind another: `up` carries queries,
keys and values, `down` the answers, `bulk` whole prompts.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import torch

from cache_rank.gloo import GlooChannel
from cache_rank.nccl import NcclChannel, unique_id
from cache_rank.transport import Channel

ABORT_SECONDS = 10.0


class Link:
    """The channels between an inference rank and its cache rank."""

    NAMES = ("up", "down", "bulk")

    def __init__(
        self,
        rendezvous: list[bytes],
        rank: int,
        device: torch.device,
        address: str,
        secret: bytes,
        timeout: float,
    ) -> None:
        """Connect all channels; both sides call this at about the same time.

        Args:
            rendezvous: of `make_rendezvous`.
            rank: INFERENCE or CACHE.
            device: where the tensors of this rank are.
            address: host name or IP of the interface that the channels bind to.
            secret: of this launch; each channel proves that both ends know it.
            timeout: seconds for the peer to appear.

        Raises:
            TransportError: the peer did not appear, or does not know the secret.
        """
        self._on_gpu = device.type == "cuda"
        channels: list[Any] = []
        for name, meeting in zip(self.NAMES, rendezvous, strict=True):
            if self._on_gpu:
                channels.append(NcclChannel(name, meeting, rank, device, timeout))
            else:
                path = meeting.decode()
                channels.append(GlooChannel(path, name, rank, address, secret, timeout))
        self.up: Channel = channels[0]
        self.down: Channel = channels[1]
        self.bulk: Channel = channels[2]
        self._bulk_stream = channels[2].stream if self._on_gpu else None

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """On a GPU, work queued inside runs on the bulk channel's stream, beside the steps."""
        if self._bulk_stream is None:
            yield
        else:
            with torch.cuda.stream(self._bulk_stream):
                yield

    def abort(self) -> None:
        """End transfers whose peer is gone, with arbitrary contents. Safe from any thread."""
        # At once: a channel frees memory when it has ended, which waits for the others' transfers.
        threads = [
            threading.Thread(target=channel.abort, daemon=True)
            for channel in (self.up, self.down, self.bulk)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORT_SECONDS)

    def close(self) -> None:
        """Drop the channels, whose transfers have ended."""
        for channel in (self.up, self.down, self.bulk):
            channel.close()


def make_rendezvous(device: torch.device, folder: str) -> list[bytes]:
    """What both ranks need to connect a link; made by the inference rank.

    For CPUs a file a channel, in a folder that only this user can read; for GPUs a secret of NCCL,
    which travels on the authenticated control channel.
    """
    if device.type != "cuda":
        return [f"{folder}/{name}-{secrets.token_hex(4)}".encode() for name in Link.NAMES]
    return [unique_id() for _ in Link.NAMES]
