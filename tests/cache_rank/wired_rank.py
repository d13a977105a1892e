"""The other end of the wire of a real cache-rank process, without a pool and without SGLang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from modelled_request import Computed, Request, pack_up
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import DownMessage, End, Load, LoadTogether, Report, Row, Step
from cache_rank.schedule import LayerMessage
from sglang_ext.two_ranks.exchange.connection import ProcessSettings
from sglang_ext.two_ranks.supervisor import Supervisor

SETTINGS = ProcessSettings("127.0.0.1")
LONG = 60.0
"""A timeout that no passing test reaches."""


@dataclass
class Reports:
    """Collects what the cache rank reports, in the supervisor's thread."""

    latest: Report | None = None
    downs: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, report: Report | None) -> None:
        with self._changed:
            self.latest = report
            self.downs += report is None
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[Report], bool]) -> None:
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self.latest is not None and condition(self.latest), timeout=15
            )
        assert arrived, f"the last report was {self.latest}"


class InferenceRank:
    """The other end of the wire, without a pool and without SGLang."""

    def __init__(
        self, config: CacheRankConfig, timeout: float = LONG, settings: ProcessSettings = SETTINGS
    ) -> None:
        self.config = config
        self.reports = Reports()
        self.supervisor = Supervisor("cache rank of a test", settings, timeout)
        self.supervisor.on_report = self.reports
        self.connection = self.supervisor.open(config)
        self.refused = 0
        """How many messages the cache rank must have refused so far."""
        self.last_step = 0
        self._last_sequence_id = 0

    def new_request(self, prompt: int) -> Request:
        self._last_sequence_id += 1
        return Request(self.config, self._last_sequence_id, prompt)

    def load(self, request: Request, chunk: int | None = None) -> None:
        """Ship a request's prompt, in chunks."""
        prompt = request.prompt
        count = prompt.shape[2]
        chunk = chunk or count
        for start in range(0, count, chunk):
            part = prompt[:, :, start : start + chunk].contiguous()
            self.send_load(Load(request.sequence_id, start, part.shape[2]), part)

    def send_load(self, message: Load | LoadTogether, shipment: Tensor) -> None:
        self.connection.control.send(message)
        self.connection.link.bulk.send(shipment).wait(LONG)

    def arrive(self, prompt: int, chunk: int | None = None) -> Request:
        request = self.new_request(prompt)
        self.load(request, chunk)
        return request

    def announce(self, rows: list[Row], step: int | None = None) -> None:
        """Announce a step."""
        if step is None:
            self.last_step += 1
            step = self.last_step
        self.connection.control.send(Step(step, rows))

    def exchange_group(
        self, layer_message: LayerMessage, tensors: Sequence[Computed]
    ) -> DownMessage:
        """Send a message and wait for its answer."""
        config, rows = self.config, len(tensors)
        sent = self.connection.link.up.send(pack_up(config, layer_message, tensors).buffer)
        layers = config.groups[layer_message.selects_for or 0]
        size = DownMessage.size(config, len(layers), rows)
        down = DownMessage(config, len(layers), rows, torch.zeros(size, dtype=torch.uint8))
        self.connection.link.down.receive(down.buffer).wait(LONG)
        sent.wait(LONG)
        return down

    def exchange(
        self, rows: list[Row], tensors: Sequence[Any], step: int | None = None
    ) -> list[DownMessage]:
        """One whole step; the answer of every group."""
        self.announce(rows, step)
        return [
            self.exchange_group(layer_message, tensors)
            for layer_message in self.config.layer_messages
        ]

    def decode(self, requests: Sequence[Request]) -> None:
        """One step of some requests, whose answers must be those of the reference."""
        tensors = [request.compute() for request in requests]
        answers = self.exchange([request.row for request in requests], tensors)
        for index, (request, computed) in enumerate(zip(requests, tensors, strict=True)):
            request.choose(*computed)
            request.check_answers(self.last_step, index, answers)

    def end(self, *requests: Request) -> None:
        self.connection.control.send(End([request.sequence_id for request in requests]))

    def expect_refused(self, count: int) -> None:
        """The cache rank counts so many more refused messages, and no others."""
        self.refused += count
        self.reports.wait_for(lambda report: report.refused_messages >= self.refused)
        assert self.reports.latest is not None
        assert self.reports.latest.refused_messages == self.refused

    def close(self) -> None:
        self.supervisor.close()
