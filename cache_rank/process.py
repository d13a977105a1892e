"""The cache-rank process: its launch, its control loop and its signs of life.

    python -m cache_rank.process < launch line

The parent writes one JSON launch line to standard input and keeps the pipe open; end of file means
that the parent is gone, and the process exits. Standard output carries one byte every heartbeat, so
that the parent notices a process that is stopped. Logs go to standard error.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

import msgspec
import torch
import zmq
from setproctitle import setproctitle

from cache_rank.channels.control import ControlReceiver, ControlSender
from cache_rank.channels.link import Link
from cache_rank.channels.transport import CACHE
from cache_rank.protocol import Open, Opened, Ready, ToCacheRank
from cache_rank.rank import CacheRank, OutOfPlaceError

logger = logging.getLogger("cache_rank")

HEARTBEAT_SECONDS = 0.25
"""The process writes a heartbeat this often."""

REPORT_SECONDS = 0.25
"""The process reports this often."""

LINK_SECONDS = 30.0
"""The inference rank must connect the data channels within this time."""


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The launch line.

    Attributes:
        name: the process's name in `ps` and in logs.
        secret: the secret of this launch, hexadecimal.
        report_endpoint: where the inference rank receives control messages.
        address: the address that the control and data channels bind to.
        device: the device of the tensors, as torch names it.
    """

    name: str
    secret: str
    report_endpoint: str
    address: str
    device: str = "cpu"


def serve(launch: Launch) -> None:
    """Report ready, open, then handle control messages in order, for ever."""
    context: zmq.Context[Any] = zmq.Context()
    secret = bytes.fromhex(launch.secret)
    control: ControlReceiver[ToCacheRank] = ControlReceiver(
        context, launch.address, secret, ToCacheRank
    )
    reports = ControlSender(context, launch.report_endpoint, secret)
    reports.send(Ready(endpoint=control.endpoint, pid=os.getpid()))

    rank: CacheRank | None = None
    last_report = 0.0
    while True:
        message = control.receive(timeout=REPORT_SECONDS)
        if rank is not None and message is not None:
            try:
                rank.handle(message)
            except OutOfPlaceError as error:
                control.refuse(str(error))
        elif isinstance(message, Open):
            device = torch.device(launch.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)  # not before: it takes memory of the GPU
            ends = (message.rendezvous, CACHE, device, launch.address, secret)
            link = Link(message.config, *ends, LINK_SECONDS)
            rank = CacheRank(message, link, device)
            reports.send(Opened(rank.selector.capacity_tokens, rank.selector.host_tokens))
            shape = msgspec.structs.replace(message.config.model, rotary_frequency=())
            logger.info("open: %s of %s", message.config.kv_residency, shape)
        elif message is not None:
            control.refuse(f"{type(message).__name__} before Open")
        if rank is not None and time.monotonic() - last_report > REPORT_SECONDS:
            last_report = time.monotonic()
            reports.send(rank.report(control.refused))


def _beat() -> None:
    """Write heartbeats until the parent closes the pipe, then exit."""
    while True:
        try:
            os.write(sys.stdout.fileno(), b".")
        except OSError:
            os._exit(0)
        time.sleep(HEARTBEAT_SECONDS)


def _watch_parent() -> None:
    """Exit when the parent closes standard input, which its death does."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


def main() -> None:
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    logging.basicConfig(
        level=logging.INFO,
        format=f"[%(asctime)s {launch.name}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    setproctitle(launch.name)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    torch.set_grad_enabled(False)
    for target in (_beat, _watch_parent):
        threading.Thread(target=target, daemon=True).start()
    try:
        serve(launch)
    except Exception:
        logger.exception("cache rank failed")
        # Not sys.exit: a thread blocked in the transport must not keep the process alive.
        os._exit(1)


if __name__ == "__main__":
    main()
