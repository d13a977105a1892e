"""The host's accounts of the exchange between two GPUs.

Right after the forward pass of a step has been queued, its transfers are queued beside it. So the
host never waits. The forward pass waits inside its graph, and only for what is late: for answers to
its own step, and in groups that are answered a step ahead for those to the step before. What came
of a step is seen some steps later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_rank.channels.transport import Pending
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.scatter import collect_tokens, copy_tokens
from cache_rank.measure.timeline import Span, host_offset
from cache_rank.protocol import AttendedMessage, Row, bulk_shape
from sglang_ext.two_ranks.exchange.base import Exchange, ExchangeCounters
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError, Connection
from sglang_ext.two_ranks.exchange.device.gate import DeviceGate, StepTimes
from sglang_ext.two_ranks.exchange.device.transfers import make_transfers
from sglang_ext.two_ranks.exchange.pinned_ring import RING_ENTRIES, DeviceToHostRing
from sglang_ext.two_ranks.exchange.slots import ExchangedRow, SlotBuffers
from sglang_ext.two_ranks.lifecycle import SparseSequence

_POLL_SECONDS = 5e-5
"""The host looks this often whether a page has come back."""

Outcome = Sequence[Sequence[int]]
"""For each request of a step, the groups in which its answer was applied, and the tokens."""


@dataclasses.dataclass(slots=True)
class _InflightStep:
    """One step; `waiting_since` is when it was first seen to have begun and not to be answered."""

    step: int
    rows: list[ExchangedRow]
    waiting_since: float | None = None


class InflightSteps:
    """Steps whose answers the device is not done with, in the order in which they were queued.

    The scheduler thread adds and reaps them; the supervisor's thread looks for overdue ones.
    """

    def __init__(self, groups: int, timeout: float) -> None:
        """Begin with none.

        Args:
            groups: layer groups, in each of which an answer must have been applied.
            timeout: seconds from when a step's first message is computed until its answers are
                overdue.
        """
        self._groups = groups
        self._timeout = timeout
        self._steps: deque[_InflightStep] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, rows: list[ExchangedRow]) -> None:
        """Add a step whose transfers have been queued."""
        with self._lock:
            self._steps.append(_InflightStep(step, rows))

    def reap(
        self, newest: int, outcome_of: Callable[[int], Outcome]
    ) -> Iterator[tuple[SparseSequence, int]]:
        """Remove the steps that are answered, and yield the tokens that each request got.

        Args:
            newest: the last step whose answers have been applied.
            outcome_of: gives the outcome of a step.

        Raises:
            CacheRankDownError: an answer was not for its request.
        """
        while self._steps and self._steps[0].step <= newest:
            oldest = self._steps[0]
            applied, shipped = outcome_of(oldest.step)
            for sequence in self._without_answer(oldest, applied):
                if not sequence.ended:
                    step, sequence_id = oldest.step, sequence.sequence_id
                    raise CacheRankDownError(
                        f"the answer to step {step} is not for sequence {sequence_id}"
                    )
            with self._lock:
                self._steps.popleft()
            for row, tokens in zip(oldest.rows, shipped, strict=False):
                yield row.sequence, tokens

    def stale_requests(
        self, step: int, newest: int, outcome_of: Callable[[int], Outcome]
    ) -> list[SparseSequence]:
        """Return the requests of a step that did not get all of their answer.

        Args:
            step: its transfers have ended, one way or the other; it may be reaped.
            newest, outcome_of: as above.
        """
        entry = next((entry for entry in self._steps if entry.step == step), None)
        if entry is None:
            return []
        if step > newest:
            return [row.sequence for row in entry.rows]
        return self._without_answer(entry, outcome_of(step)[0])

    def _without_answer(self, entry: _InflightStep, applied: Sequence[int]) -> list[SparseSequence]:
        pairs = zip(entry.rows, applied, strict=False)
        return [row.sequence for row, groups in pairs if groups != self._groups]

    def check_deadline(self, applied: int, computed: int) -> None:
        """Look for an overdue answer. Long prompts may be computed before a step is.

        Args:
            applied: the last step whose answers have been applied.
            computed: the last step whose first message has been computed.

        Raises:
            CacheRankDownError: an answer is overdue.
        """
        with self._lock:
            oldest = self._steps[0] if self._steps else None
        if oldest is None or oldest.step <= applied or oldest.step > computed:
            return
        now = time.monotonic()
        if oldest.waiting_since is None:
            oldest.waiting_since = now
        late = now - oldest.waiting_since
        if late > self._timeout:
            raise CacheRankDownError(f"no answer to step {oldest.step} in {late:.1f} s")


class Verifications:
    """Counts the verifications by the cache rank that a device has begun, and those it has ended.

    The thread that looks for a late one reads host memory alone. If it asked the driver, it could
    have to wait for the thread that queues the verification.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._begun, self._ended = (DeviceToHostRing(self._number) for _ in range(2))
        self._timeout = timeout
        self._waiting_since: tuple[int, float] | None = None

    def begin(self) -> None:
        self._number += 1
        self._begun.post(self._number)

    def end(self) -> None:
        self._ended.post(self._number)

    def check_deadline(self) -> None:
        """Raise CacheRankDownError if one has been under way for too long."""
        number, now = self._begun.newest, time.monotonic()
        if number <= self._ended.newest:
            return
        if self._waiting_since is None or self._waiting_since[0] != number:
            self._waiting_since = number, now
        if (late := now - self._waiting_since[1]) > self._timeout:
            raise CacheRankDownError(f"a verification is not answered in {late:.1f} s")


class DeviceExchange(Exchange):
    """The exchange between ranks that have a GPU each."""

    def __init__(
        self,
        connection: Connection,
        config: CacheRankConfig,
        slots: SlotBuffers,
        counters: ExchangeCounters,
        gate: DeviceGate,
        chunk_tokens: int,
        coded_tokens: int,
    ) -> None:
        super().__init__(connection, config, slots, counters, chunk_tokens, coded_tokens)
        self._gate = gate
        self._encoding_stream = torch.cuda.Stream(slots.device)
        self._room_stream = torch.cuda.Stream(slots.device)
        self._step = 0
        self._rows: list[ExchangedRow] = []
        self._inflight = InflightSteps(len(config.groups), connection.timeout)
        self._waits_for_itself = any(message.same_step for message in config.layer_messages)
        self._queued = 0
        self._awaited: dict[int, int] = {}  # by step, whose answers its forward pass waits for
        self._verifications = Verifications(slots.device, connection.timeout)
        self._is_closed = False
        self._times: list[StepTimes] = []
        self._traced_steps: set[int] = set()
        self._warm_up()
        self._transfers = make_transfers(connection, config, slots, gate)
        connection.before_abort = gate.close
        connection.check = self._check_deadline
        gate.open()

    def _warm_up(self) -> None:
        """Run kernels of shipments and verifications, so that no request waits for a compiler."""
        config, slots = self._config, self._slots
        self._verifications.begin()
        self._verifications.end()
        row = torch.zeros(1, dtype=torch.int64, device=slots.device)
        shipment = self._make_room(config.model.bytes_per_token)
        shipment = shipment.view(config.model.torch_dtype).view(bulk_shape(config, 1))
        collect_tokens(slots.keys, slots.values, row, shipment)
        copy_tokens(slots.keys, slots.values, row, row)
        if self._encoder is not None:
            most = self._encoder.most
            tokens, packed = self._encoder.room(most).zero_(), self._encoder.size(most)
            with self._encoding():
                self._encoder.encode(tokens, self._make_room(packed))

    def announce(self, step: int, rows: list[ExchangedRow], traced: bool = False) -> None:
        self._reap()
        self._step, self._rows = step, rows
        super().announce(step, rows, traced)
        self._transfers.times.choose(step if traced else None)
        if traced:
            self._traced_steps.add(step)

    def finish_step(self) -> None:
        """Queue the transfers of the step, behind its forward pass, which has just been queued."""
        if not self._rows:
            return
        self._gate.clock.expect(self._step)
        self._awaited[self._step] = self._step if self._waits_for_itself else self._queued
        self._queued = self._step
        self._inflight.add(self._step, self._rows)
        self._transfers.queue(self._step, self._rows)
        self._count_messages(self._transfers.messages.nbytes(len(self._rows)))

    @property
    def is_lost(self) -> bool:
        return self._is_closed or not self._gate.is_open

    def stale_requests(
        self, step: int, sequences: Sequence[SparseSequence]
    ) -> list[SparseSequence]:
        if not self.is_lost:
            return []  # nothing has ended a wait
        if self._gate.timed_out(step):
            return list(sequences)  # answers may have been applied a moment later
        outcomes = self._transfers.outcomes
        stale = self._inflight.stale_requests(
            self._awaited.get(step, 0), outcomes.newest, lambda step: outcomes.entry(step).tolist()
        )
        return [sequence for sequence in sequences if sequence in stale]

    def ship_pages(self, sequence: SparseSequence, pool_rows: Tensor) -> None:
        # What was gathered last has to be encoded before its memory takes these tokens.
        torch.cuda.current_stream().wait_stream(self._encoding_stream)
        super().ship_pages(sequence, pool_rows)

    def _make_room(self, size: int) -> Tensor:
        # Shipments are made on several streams. What one has waited for is no longer noted, and the
        # others have to wait for it, too.
        with torch.cuda.stream(self._room_stream):
            room = super()._make_room(size)
        torch.cuda.current_stream().wait_stream(self._room_stream)
        return room

    @contextlib.contextmanager
    def _encoding(self) -> Iterator[None]:
        self._encoding_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._encoding_stream):
            yield

    def begin_attending(self, rows: list[Row], width: int) -> None:
        super().begin_attending(rows, width)
        self._verifications.begin()
        assert self._answer is not None
        with self.connection.link.in_background():
            self._answer.buffer.record_stream(torch.cuda.current_stream())

    def attend(self, queries: Tensor) -> tuple[AttendedMessage, Pending]:
        answer = super().attend(queries)
        with self.connection.link.in_background():
            queries.record_stream(torch.cuda.current_stream())
        return answer

    def end_attending(self) -> None:
        self._verifications.end()

    def restore(self, names: list[int], pool_rows: Tensor, forward: Any = None) -> None:
        # What is queued may still read these rows. It ends by itself, if it takes its time.
        for stream in filter(None, (torch.cuda.current_stream(), forward)):
            stream.synchronize()
        with self.connection.link.in_background():
            super().restore(names, pool_rows)

    def prepare_restore(self) -> None:
        with self.connection.link.in_background():
            super().prepare_restore()

    def _wait_for_pages(self, deadline: float) -> None:
        # The end of a connection ends transfers, too, with arbitrary contents.
        received = torch.cuda.current_stream().record_event()
        while not received.query() and self._gate.is_open:
            if time.monotonic() > deadline:
                raise CacheRankDownError(f"no pages came back in {self.connection.timeout:g} s")
            time.sleep(_POLL_SECONDS)
        if not self._gate.is_open:
            raise CacheRankDownError("it was lost while pages came back")

    def close(self) -> None:
        self._is_closed = True
        self._gate.close()
        # Else the connection keeps this exchange, its graphs and its buffers.
        self.connection.before_abort = self.connection.check = lambda: None
        super().close()
        # What is still queued writes memory that is freed with this exchange. It comes to its end,
        # because `finish` ends every transfer that it waits for.
        self.connection.link.finish()
        with self._encoding():  # behind tokens that were gathered, and not sent
            torch.cuda.current_stream().synchronize()
        self._transfers.scatter_stream.synchronize()
        with self.connection.link.in_background():  # pages that came are being put into rows
            torch.cuda.current_stream().synchronize()

    def spans(self) -> list[Span]:
        self._read_clock()
        times, self._times = self._times, []
        spans = self._transfers.times.take_spans()
        offset = host_offset(self._slots.device)
        for step_times in times:
            spans += self._layer_spans(step_times, offset)
        return spans

    def _layer_spans(self, times: StepTimes, offset: int) -> list[Span]:
        spans = []
        layers = [(stamp + offset) / 1e3 for stamp in times.layers]
        waits = self._gate.clock.waits(times)
        for group, (members, wait) in enumerate(zip(self._config.groups, waits, strict=True)):
            start, stop = layers[members.start], layers[min(members.stop, len(layers) - 1)]
            spans.append(Span("wait", start - 1e6 * wait, start, times.step, group))
            if group + 1 < len(waits):
                stop -= 1e6 * waits[group + 1]
            spans.append(Span("group", start, stop, times.step, group))
            for layer in members[:-1]:
                span = (layers[layer], layers[layer + 1], times.step, group)
                spans.append(Span(f"layer {layer}", *span, track="layers"))
        return spans

    def _read_clock(self) -> None:
        while (times := self._gate.clock.completed()) is not None:
            self.waited = sum(self._gate.clock.waits(times))
            if times.step in self._traced_steps:
                self._times.append(times)

    def _reap(self) -> None:
        """Account for the steps that the device is done with."""
        self._read_clock()
        outcomes = self._transfers.outcomes
        for sequence, tokens in self._inflight.reap(
            outcomes.newest, lambda step: outcomes.entry(step).tolist()
        ):
            self._count_tokens(sequence, tokens)
        for step in [step for step in self._awaited if step <= outcomes.newest - RING_ENTRIES]:
            del self._awaited[step]

    def _check_deadline(self) -> None:
        """Look for overdue answers, in the supervisor's thread; see InflightSteps."""
        self._inflight.check_deadline(self._transfers.outcomes.newest, self._gate.begun.newest)
        self._verifications.check_deadline()
