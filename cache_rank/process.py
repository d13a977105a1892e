"""The cache-rank process: receive, append, predict, select, pack, send, group after group.

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
import psutil
import torch
import zmq
from setproctitle import setproctitle
from torch import Tensor

from cache_rank import residency
from cache_rank.config import CacheRankConfig
from cache_rank.control import ControlReceiver, ControlSender
from cache_rank.prediction import QueryPredictor
from cache_rank.protocol import (
    NO_EPOCH,
    AnswerHeader,
    DownMessage,
    End,
    Flush,
    Load,
    Open,
    Opened,
    Ready,
    Report,
    Row,
    Step,
    ToCacheRank,
    UpMessage,
    bulk_shape,
)
from cache_rank.recall import measure_recall
from cache_rank.recording import Recorder
from cache_rank.sequence import Sequence
from cache_rank.transport import CACHE, Link, Pending

logger = logging.getLogger("cache_rank")

HEARTBEAT_SECONDS = 0.25
REPORT_SECONDS = 0.25
PEER_SECONDS = 600.0
"""Longest wait for the inference rank in the middle of a step, which may be slow or compiling; its
death ends this process at once anyway."""

LINK_SECONDS = 30.0
"""Longest wait for the inference rank to connect the data channels."""

MEMORY_SHARE = 0.5
"""Share of the free memory that resident tokens may take."""


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The launch line.

    Attributes:
        name: shown by `ps` and in logs.
        secret: hexadecimal, of this launch.
        report_endpoint: where the inference rank receives control messages.
        address: to bind the control and data channels to.
        log_level: a name of the logging module.
    """

    name: str
    secret: str
    report_endpoint: str
    address: str
    log_level: str = "INFO"


class CacheRank:
    """Serves one inference rank, from Open to the end of the process."""

    def __init__(self, config: CacheRankConfig, link: Link, device: torch.device) -> None:
        residency.require_format(config.kv_residency)
        self.config = config
        self.capacity_tokens = _memory_free() // config.model.bytes_per_token
        self.sequences: dict[int, Sequence] = {}
        self.overflow_tokens = 0
        self.recall = self.attention_mass = float("nan")
        self._link = link
        self._device = device
        self._predictor = QueryPredictor(config, device)
        self._recorder = Recorder.from_environment()
        self._last_epoch = 0
        self._last_step = 0
        largest = max(len(layers) for layers in config.groups)
        self._up = self._buffer(UpMessage.size(config, largest, config.max_rows))
        # One buffer a group: the answer of a group is still under way while the next is computed.
        self._down = [
            self._buffer(DownMessage.size(config, len(layers), config.max_rows))
            for layers in config.groups
        ]
        self._sent: list[Pending | None] = [None] * len(config.groups)

    def _buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def load(self, message: Load) -> str | None:
        """Take over a bulk shipment; the reason when it is refused.

        The tensor of a refused shipment is received and dropped, so that the channel stays in step;
        only a size that no inference rank ships is refused before.
        """
        config = self.config
        if not 0 < message.count <= self.capacity_tokens:
            return f"Load of {message.count} tokens, {self.capacity_tokens} fit"
        shipment = torch.empty(
            bulk_shape(config, message.count), dtype=config.model.torch_dtype, device=self._device
        )
        self._link.bulk.receive(shipment).wait(PEER_SECONDS)
        if message.start == 0 and message.epoch > self._last_epoch:
            self._last_epoch = message.epoch
            self.sequences[message.epoch] = Sequence(message.epoch, config, self._device)
        sequence = self.sequences.get(message.epoch)
        if sequence is None:
            return f"Load for epoch {message.epoch}, which is not live"
        if sequence.residency.tokens != message.start:
            held = sequence.residency.tokens
            return f"Load at {message.start} for epoch {message.epoch}, which holds {held} tokens"
        sequence.residency.append(range(config.model.layers), shipment[0], shipment[1])
        self._recorder.record_load(message, shipment)
        return None

    def end(self, message: End) -> str | None:
        """Forget epochs; the reason when one of them was not live."""
        unknown = [epoch for epoch in message.epochs if self.sequences.pop(epoch, None) is None]
        return f"End of epochs {unknown}, which are not live" if unknown else None

    def step(self, message: Step) -> str | None:
        """Exchange one decode step; the reason when rows of it were refused.

        A refused row gets an answer of no epoch, which changes nothing on the inference rank.
        """
        refused = self._refused_rows(message)
        live = [
            (index, row, self.sequences[row.epoch])
            for index, row in enumerate(message.rows)
            if index not in refused
        ]
        for group, layers in enumerate(self.config.groups):
            self._step_group(message, group, layers, live)
        self._last_step = max(self._last_step, message.step)
        return "; ".join(refused.values()) or None

    def _refused_rows(self, message: Step) -> dict[int, str]:
        refused = {}
        epochs: set[int] = set()
        for index, row in enumerate(message.rows):
            sequence = self.sequences.get(row.epoch)
            if sequence is None:
                refused[index] = f"row of epoch {row.epoch}, which is not live"
            elif row.position != sequence.residency.tokens:
                held = sequence.residency.tokens
                refused[index] = f"row at {row.position} of epoch {row.epoch} at {held}"
            elif message.step <= self._last_step:
                refused[index] = f"row of step {message.step} after step {self._last_step}"
            elif row.epoch in epochs:
                refused[index] = f"second row of epoch {row.epoch}"
            else:
                epochs.add(row.epoch)
        return refused

    def _step_group(
        self,
        message: Step,
        group: int,
        layers: range,
        live: list[tuple[int, Row, Sequence]],
    ) -> None:
        config, rows = self.config, len(message.rows)
        up = UpMessage(
            config, len(layers), rows, self._up[: UpMessage.size(config, len(layers), rows)]
        )
        self._link.up.receive(up.buffer).wait(PEER_SECONDS)
        if config.recall_interval and message.step % config.recall_interval == 0 and live:
            index, row, sequence = live[0]
            self.recall, self.attention_mass = measure_recall(
                sequence, config, layers, up.queries[index], row.position
            )
        for index, _, sequence in live:
            sequence.append(layers, up.queries[index], up.keys[index], up.values[index])

        if (sent := self._sent[group]) is not None:
            sent.wait(PEER_SECONDS)
        size = DownMessage.size(config, len(layers), rows)
        down = DownMessage(config, len(layers), rows, self._down[group][:size])
        down.header.fill_(NO_EPOCH)
        down.slots.fill_(-1)
        if live:
            windows = [sequence.window for _, _, sequence in live]
            predicted = self._predictor.predict(windows, layers)
            for queries, (index, row, sequence) in zip(predicted, live, strict=True):
                self._answer(message.step, layers, sequence, row, queries, down, index)
        self._sent[group] = self._link.down.send(down.buffer)
        self._recorder.record_step(message.step, group, layers, live, up)

    def _answer(
        self,
        step: int,
        layers: range,
        sequence: Sequence,
        row: Row,
        predicted: Tensor,
        down: DownMessage,
        index: int,
    ) -> None:
        selection = sequence.select(layers, predicted, row.position)
        keys, values = sequence.residency.gather(layers, selection.entering)
        down.slots[index] = selection.slots
        down.keys[index] = keys
        down.values[index] = values
        self.overflow_tokens += int(selection.overflow.sum())
        header = AnswerHeader(
            step=step,
            epoch=row.epoch,
            resident_tokens=row.position + 1,
            filled_slots=sequence.filled[layers.start],
            shipped_tokens=int((selection.slots >= 0).sum()),
            checksum=sequence.checksum(layers) if self.config.checksum else 0,
        )
        down.header[index] = torch.tensor(header, dtype=torch.int64)

    def report(self, refused_messages: int) -> Report:
        """Summarize what is held and what has been done."""
        held = self.sequences.values()
        return Report(
            tokens_held=sum(sequence.residency.tokens for sequence in held),
            bytes_held=sum(sequence.residency.bytes_held for sequence in held),
            epochs=len(self.sequences),
            overflow_tokens=self.overflow_tokens,
            refused_messages=refused_messages,
            recall=self.recall,
            attention_mass=self.attention_mass,
        )


def serve(launch: Launch) -> None:
    """Say ready, open, then handle control messages in order, for ever."""
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
        reason: str | None = None
        if isinstance(message, Open) and rank is None:
            link = Link(message.rendezvous, CACHE, launch.address, secret, LINK_SECONDS)
            rank = CacheRank(message.config, link, torch.device("cpu"))
            reports.send(Opened(capacity_tokens=rank.capacity_tokens))
            shape = msgspec.structs.replace(message.config.model, rotary_frequency=())
            logger.info("open: %s of %s", message.config.kv_residency, shape)
        elif message is None or rank is None:
            reason = f"{type(message).__name__} before Open" if message is not None else None
        elif isinstance(message, Open):
            reason = "second Open"
        elif isinstance(message, Step):
            reason = rank.step(message)
        elif isinstance(message, Load):
            reason = rank.load(message)
        elif isinstance(message, End):
            reason = rank.end(message)
        elif isinstance(message, Flush):
            rank.sequences.clear()
        if reason:
            control.refuse(reason)
        if rank is not None and time.monotonic() - last_report > REPORT_SECONDS:
            last_report = time.monotonic()
            reports.send(rank.report(control.refused))


def _memory_free() -> int:
    return int(psutil.virtual_memory().available * MEMORY_SHARE)


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
    """Run until the parent goes away."""
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    logging.basicConfig(
        level=launch.log_level.upper(),
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
