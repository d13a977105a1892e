"""What a cache rank does for each message: receive, append, predict, score, select, gather, send.

It has a link and a selector; process.py hands it the messages, one after the other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence

import psutil
import torch
from torch import Tensor

from cache_rank import residency
from cache_rank.batch_metadata import BatchMetadata
from cache_rank.channels.link import Link
from cache_rank.channels.rate import RateLimit
from cache_rank.channels.transport import Pending
from cache_rank.copies import Readback
from cache_rank.measure.recording import Recorder
from cache_rank.messages import MessageBuffers
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import (
    Adopt,
    Attend,
    AttendedMessage,
    DownMessage,
    Drop,
    End,
    Flush,
    KeyBasis,
    Load,
    LoadTogether,
    Open,
    QueryProjection,
    Report,
    Restore,
    Share,
    Step,
    ToCacheRank,
    UpMessage,
    basis_shape,
    bulk_shape,
    down_sizes,
    projection_shape,
)
from cache_rank.residency import memory_for_tokens
from cache_rank.residency.encoding import shipment_bytes
from cache_rank.resident_sequence import ResidentSequence
from cache_rank.schedule import LayerMessage
from cache_rank.selector import Selector
from cache_rank.warm_up import warm_up

PEER_SECONDS = 600.0
"""The cache rank waits so long for the inference rank in the middle of a step, which may be slow or
compiling. The inference rank's death ends this process at once anyway."""


class OutOfPlaceError(ValueError):
    """A message that no inference rank sends, or not here; what is wrong in it changes nothing."""


class CacheRank:
    """Serves one inference rank, from Open to the end of the process.

    Methods for messages raise OutOfPlaceError.
    """

    def __init__(self, message: Open, link: Link, device: torch.device) -> None:
        config = message.config
        residency.require_format(config)
        self.config = config
        free, on_gpu = _free_memory(device), device.type == "cuda"
        memory = memory_for_tokens(free, message.memory_fraction, on_gpu)
        self.selector = Selector(config, device, memory, message.host_bytes, message.trace)
        if self.selector.pages.pages == 0:
            raise ValueError(
                f"{memory / 1e9:.3f} GB hold no page of tokens beside what {config.max_rows} "
                "requests take in any case: raise --cache-rank-mem-fraction, or lower "
                "--max-sparse-requests"
            )
        self._link = link
        self._rate = RateLimit.of_environment()
        self._device = device
        self._recorder = Recorder(config)
        self._timeline = self.selector.timeline
        self._overflow, self._overflow_tokens = Readback(), 0
        self._last_sequence_id = 0
        self._last_step = 0
        # One buffer a message: on a GPU several are under way at once.
        answers = [
            torch.zeros(size, dtype=torch.uint8, device=device)
            for size in down_sizes(config, config.max_rows)
        ]
        self._messages = MessageBuffers(config, link.buffers, answers)
        self._shipment_bytes = functools.cache(functools.partial(shipment_bytes, config))
        self._layer_messages = config.layer_messages
        self._taken: list[torch.cuda.Event | None] = [None] * len(self._layer_messages)
        self._sent: dict[int | None, Pending] = {}
        self._loaded: dict[int, torch.cuda.Event | None] = {}
        self._received_of_layers: torch.cuda.Event | None = None
        warm_up(self.selector, self._messages, link, device)

    def handle(self, message: ToCacheRank) -> None:
        """Do what a message asks for that comes after Open."""
        match message:
            case Step():
                self.step(message)
            case Load(as_codes=True):
                self.load_codes(message)
            case Load():
                self.load([message])
            case LoadTogether():
                self.load(message.loads)
            case Adopt():
                self.adopt(message)
            case Share():
                self.share(message)
            case Drop():
                self.drop(message.names)
            case Restore():
                self.restore(message.names)
            case Attend():
                self.attend(message)
            case QueryProjection():
                self.load_projection(message)
            case KeyBasis():
                self.load_basis(message)
            case End():
                self.end(message.sequence_ids)
            case Flush():
                self.flush()
            case Open():
                raise OutOfPlaceError("second Open")

    def load(self, loads: Sequence[Load]) -> None:
        """Take over a bulk shipment of tokens as they are, of one sequence after the other.

        What is refused is received and dropped, so that the channel stays in step; only a size that
        no inference rank ships is refused before.
        """
        config, selector = self.config, self.selector
        self._require_fit([load.count for load in loads])
        _require(not any(load.as_codes for load in loads), "LoadTogether of codes")
        count = sum(load.count for load in loads)
        with self._receive_bulk(bulk_shape(config, count), config.model.torch_dtype) as tokens:
            parts: dict[int, tuple[ResidentSequence, int, int]] = {}
            first, refused = 0, []
            for load in loads:
                try:
                    sequence = self._loaded_at(load)
                    _require(sequence.sequence_id not in parts, f"second {load}")
                    parts[load.sequence_id] = sequence, first, load.count
                except OutOfPlaceError as error:
                    refused.append(str(error))
                first += load.count
            selector.load_together(list(parts.values()), tokens)
            for sequence_id, (_, first, count) in parts.items():
                shipment = tokens[:, :, first : first + count]
                self._recorder.write("load", sequence_id=sequence_id, shipment=shipment)
            self._loaded |= dict.fromkeys(parts, self._mark())
        _require(not refused, "; ".join(refused))

    def load_codes(self, load: Load) -> None:
        """Take over a bulk shipment of complete pages as codes, as `load` does."""
        count = load.count
        self._require_fit([count])
        may_be = residency.takes_codes(self.config) and count % PAGE_TOKENS == 0
        _require(may_be, f"Load of {count} tokens as codes")
        with self._receive_bulk((self._shipment_bytes(count),), torch.uint8) as packed:
            sequence = self._loaded_at(load)
            self.selector.load_pages(sequence, count, packed)
            self._loaded[load.sequence_id] = self._mark()

    def _require_fit(self, counts: Sequence[int]) -> None:
        fit = self.selector.capacity_tokens
        are_some = min(counts, default=0) > 0 and sum(counts) <= fit
        _require(are_some, f"Load of {counts} tokens, {fit} fit")

    def _loaded_at(self, load: Load) -> ResidentSequence:
        """The sequence that goes on with what is loaded."""
        sequence = self._live(load.sequence_id, "Load", begins=load.start == 0)
        may_be, how = sequence.tokens == load.start, ""
        if load.as_codes:
            may_be, how = self.selector.may_load_pages(sequence, load.start), ", as codes"
        where = f"Load at {load.start} for sequence {load.sequence_id}"
        _require(may_be, f"{where}, which holds {sequence.tokens} tokens{how}")
        return sequence

    def _live(self, sequence_id: int, wanted_for: str, begins: bool) -> ResidentSequence:
        """A live sequence, which begins now if it is new and may."""
        what = f"{wanted_for} for sequence {sequence_id}"
        if begins and sequence_id > self._last_sequence_id:
            _require(not self.selector.is_full, f"{what}: {self.config.max_rows} are live")
            self._last_sequence_id = sequence_id
            return self.selector.begin(sequence_id)
        _require(sequence_id in self.selector.sequences, f"{what}, which is not live")
        return self.selector.sequences[sequence_id]

    def adopt(self, message: Adopt) -> None:
        """Let a sequence begin with pages that are there."""
        selector, sequence_id = self.selector, message.sequence_id
        known = {name for name in message.names if name in selector.named}
        what = f"Adopt for sequence {sequence_id}"
        are_there = len(known) == len(message.names)
        _require(are_there, f"{what} of pages {message.names}, not all of which there are")
        sequence = self._live(sequence_id, "Adopt", begins=True)
        _require(not sequence.pages, f"{what}, which holds {sequence.tokens} tokens")
        with self._link.in_background():  # behind the shipments that the pages came with
            if self._device.type == "cuda":
                # Steps of ended sequences may still write into the page that a copy gets.
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            selector.adopt(sequence, message.names)
            self._loaded[sequence_id] = self._mark()

    def share(self, message: Share) -> None:
        """Name pages of a sequence."""
        selector, sequence_id, names = self.selector, message.sequence_id, message.names
        sequence = self._live(sequence_id, "Share", begins=False)
        shares, what = residency.shared_tail(self.config) is not None, f"Share of pages {names}"
        _require(shares, f"{what}, which {self.config.kv_residency} does not")
        new = {name for name in names if name not in selector.named}
        _require(len(new) == len(names), f"{what}, some of which there are")
        are_complete = selector.may_share(sequence, names)
        _require(are_complete, f"{what} of sequence {sequence_id}, which are not complete")
        selector.share(sequence, names)

    def drop(self, names: Collection[int]) -> None:
        """Forget names of pages, as far as they are known."""
        known = {name for name in names if name in self.selector.named}
        self.selector.named.drop(known)
        unknown = sorted({*names} - known)
        _require(not unknown, f"Drop of pages {unknown}, which there are not")

    def restore(self, names: Sequence[int]) -> None:
        """Send pages back, packed; none if some of the names are not known.

        A page is packed when the one before it is gone, or on a GPU on its way.
        """
        are_there = all(name in self.selector.named for name in names)
        tokens = PAGE_TOKENS * len(names) if are_there else 0
        with self._link.in_background():  # behind the shipments that the pages came with
            sent = self._link.bulk.send(torch.tensor([tokens], device=self._device))
            for name in names if are_there else ():
                packed = self.selector.pack_named(name)
                sent.wait(PEER_SECONDS)
                self._rate.wait(packed.nbytes)
                sent = self._link.bulk.send(packed)
            sent.wait(PEER_SECONDS)
        _require(tokens > 0, f"Restore of pages {names}, some of which there are not")

    def attend(self, message: Attend) -> None:
        """Attend for requests whose drafts are verified, layer after layer.

        All of it is queued behind the shipments that the tokens came with. Nothing is received for
        rows that no inference rank sends, which then finds that this rank does not answer.
        """
        config, rows, width = self.config, message.rows, message.width
        may_be = 0 < len(rows) <= config.max_rows and 0 < width <= config.verified_tokens
        _require(may_be, f"Attend of {len(rows)} rows, {width} queries each")
        for row in rows:
            sequence = self.selector.sequences.get(row.sequence_id)
            held = None if sequence is None else sequence.tokens
            why = f"Attend at {row.position} for sequence {row.sequence_id}, which holds {held}"
            _require(held == row.position > 0, why)
        with self._link.in_background():
            self._attend(self.selector.attended(rows), width)

    def _attend(self, rows: BatchMetadata, width: int) -> None:
        config, bulk = self.config, self._link.bulk
        answer = AttendedMessage(config, len(rows.slots), width, self._device)
        queries = torch.empty_like(answer.outputs)
        for layer in range(config.model.layers):
            bulk.receive(queries).wait(PEER_SECONDS)
            self.selector.attend(rows, layer, queries, answer)
            bulk.send(answer.buffer).wait(PEER_SECONDS)

    def load_projection(self, message: QueryProjection) -> None:
        """Take over by what a layer's queries are forecast.

        Nothing is received for a layer that no inference rank sends.
        """
        config, layer = self.config, message.layer
        is_forecast = config.forecasts and 0 <= layer < config.model.layers
        _require(is_forecast, f"QueryProjection of layer {layer}, which is not forecast")
        dtype = config.model.torch_dtype
        with self._receive_bulk(projection_shape(config), dtype) as projection:
            self.selector.load_projection(layer, projection)
            self._received_of_layers = self._mark()
            self._recorder.write("projection", layer=layer, projection=projection)

    def load_basis(self, message: KeyBasis) -> None:
        """Take over how a layer's keys are sketched.

        Nothing is received for a layer that no inference rank sends.
        """
        config, layer = self.config, message.layer
        is_sketched = config.score_keys == "sketch" and 0 <= layer < config.model.layers
        _require(is_sketched, f"KeyBasis of layer {layer}, which has no sketch")
        with self._receive_bulk(basis_shape(config), torch.float32) as basis:
            self.selector.load_basis(layer, basis)
            self._received_of_layers = self._mark()
            self._recorder.write("basis", layer=layer, basis=basis)

    @contextlib.contextmanager
    def _receive_bulk(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """Receive a tensor, and run beside the steps what is done with it inside."""
        with self._link.in_background():
            received = torch.empty(shape, dtype=dtype, device=self._device)
            # Steps of ended sequences may still write into the pages that a shipment gets.
            after = torch.cuda.default_stream().record_event() if received.is_cuda else None
            self._link.bulk.receive(received, after).wait(PEER_SECONDS)
            yield received

    def end(self, sequence_ids: Collection[int]) -> None:
        """Forget sequences, as far as they are live."""
        for sequence_id in sequence_ids:
            # A load that is under way still writes into pages and strategies that others get next.
            self._wait_for_load(sequence_id)
        unknown = [each for each in sequence_ids if not self.selector.end(each)]
        _require(not unknown, f"End of sequences {unknown}, which are not live")

    def flush(self) -> None:
        """Forget every sequence and every name."""
        self.end(list(self.selector.sequences))
        self.drop(list(self.selector.named))

    def step(self, message: Step) -> None:
        """Exchange one decode step.

        A refused row gets an answer of no sequence, which changes nothing on the inference rank. A
        number of rows that no inference rank sends is refused before anything is received.
        """
        count, most = len(message.rows), self.config.max_rows
        _require(0 < count <= most, f"Step of {count} rows, 1 to {most} were agreed")
        refused = self._refused_rows(message)
        for row in message.rows:
            self._wait_for_load(row.sequence_id)
        if self._received_of_layers is not None:
            torch.cuda.current_stream().wait_event(self._received_of_layers)
            self._received_of_layers = None
        step = self.selector.begin_step(message.step, message.rows, refused.keys())
        self._timeline.enter_step(message.step, message.traced)
        messages = self._messages.of(count)
        for index, (layer_message, up) in enumerate(
            zip(self._layer_messages, messages.up, strict=True)
        ):
            answer = messages.answer_of(layer_message)
            self._receive(index, up)
            if (before := self._sent.get(layer_message.selects_for)) is not None:
                before.wait(PEER_SECONDS)  # until the last step's answer has left its buffer
            self.selector.serve(step, layer_message, up, answer)
            self._send(layer_message, answer)
            self._taken[index] = self._mark()  # the buffer may be written again then
            self._recorder.write_step(self.selector, step, layer_message, up)
        self.selector.end_step(step)
        self._last_step = max(self._last_step, message.step)
        _require(not refused, "; ".join(refused.values()))

    def _wait_for_load(self, sequence_id: int) -> None:
        """Let the steps that follow wait, on the device, for the last load of a sequence."""
        if (loaded := self._loaded.pop(sequence_id, None)) is not None:
            torch.cuda.current_stream().wait_event(loaded)

    def _receive(self, index: int, up: UpMessage) -> None:
        """Let what is queued next wait for a message, and on a CPU the host.

        It is posted only when the answer before is queued: should the host have to wait for the
        device in between, both ranks are waiting for that answer.
        """
        layer_message = self._layer_messages[index]
        received = self._link.up.receive(up.buffer, self._taken[index], buffer_index=index)
        self._timeline.mark(layer_message, "begin")
        received.wait(PEER_SECONDS)
        self._timeline.mark(layer_message, "receive")

    def _send(self, layer_message: LayerMessage, answer: DownMessage | None) -> None:
        """Send an answer, if there is one, when what is queued has written it."""
        group = layer_message.selects_for
        if group is not None and answer is not None:
            self._sent[group] = self._link.down.send(answer.buffer, buffer_index=group)

    def _refused_rows(self, message: Step) -> dict[int, str]:
        refused = {}
        sequence_ids: set[int] = set()
        for index, row in enumerate(message.rows):
            sequence = self.selector.sequences.get(row.sequence_id)
            if sequence is None:
                refused[index] = f"row of sequence {row.sequence_id}, which is not live"
            elif not 0 <= row.position - sequence.tokens < max(1, self.config.draft_steps):
                held = sequence.tokens
                refused[index] = f"row at {row.position} of sequence {row.sequence_id} at {held}"
            elif message.step <= self._last_step:
                refused[index] = f"row of step {message.step} after step {self._last_step}"
            elif row.sequence_id in sequence_ids:
                refused[index] = f"second row of sequence {row.sequence_id}"
            else:
                sequence_ids.add(row.sequence_id)
        return refused

    def report(self, refused_messages: int) -> Report:
        """Summarize what is held and what has been done; device counters are a report old."""
        if (overflow := self._overflow.value()) is not None:  # else the device is behind
            self._overflow_tokens = int(overflow)
        self._overflow.start(self.selector.overflow)
        return Report(
            tokens_held=self.selector.tokens_held,
            bytes_held=self.selector.bytes_held,
            tokens_kept=self.selector.tokens_kept,
            tokens_on_host=self.selector.tokens_on_host,
            sequences=len(self.selector.sequences),
            overflow_tokens=self._overflow_tokens,
            refused_messages=refused_messages,
        )

    def _mark(self) -> torch.cuda.Event | None:
        """An event behind what is queued; on a CPU, where nothing is, none."""
        return torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise OutOfPlaceError(otherwise)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
