"""What a cache rank does for each message: receive, append, predict, select, gather, send.

It has a link and a selector; process.py hands it the messages, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import psutil
import torch
from torch import Tensor

from cache_rank import residency
from cache_rank.channels.link import Link
from cache_rank.channels.transport import Pending
from cache_rank.copies import Readback
from cache_rank.measure.recording import Recorder
from cache_rank.messages import MessageBuffers
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import (
    NO_SEQUENCE,
    Adopt,
    DownMessage,
    KeyBasis,
    Load,
    Open,
    QueryProjection,
    Report,
    Row,
    Share,
    Step,
    UpMessage,
    basis_shape,
    bulk_shape,
    down_sizes,
    projection_shape,
)
from cache_rank.residency import memory_for_tokens
from cache_rank.schedule import LayerMessage
from cache_rank.selector import Selector

WARM_UP_TOKENS = 768
"""A sequence of so many tokens has used all kernels of every format, but for those of its steps.

`mosaickv` needs most: 256 open a sequence, and two runs of 256 are compressed by what they were.
"""

PEER_SECONDS = 600.0
"""The cache rank waits so long for the inference rank in the middle of a step, which may be slow or
compiling. The inference rank's death ends this process at once anyway."""


class CacheRank:
    """Serves one inference rank, from Open to the end of the process."""

    def __init__(self, message: Open, link: Link, device: torch.device) -> None:
        config = message.config
        residency.require_format(config)
        self.config = config
        free, on_gpu = _free_memory(device), device.type == "cuda"
        memory = memory_for_tokens(free, message.memory_fraction, on_gpu)
        self.selector = Selector(config, device, memory, message.trace)
        if self.selector.pages.pages == 0:
            raise ValueError(
                f"{memory / 1e9:.3f} GB hold no page of tokens beside what {config.max_rows} "
                "requests take in any case: raise --cache-rank-mem-fraction, or lower "
                "--max-sparse-requests"
            )
        self._link = link
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
        self._layer_messages = config.layer_messages
        self._taken: list[torch.cuda.Event | None] = [None] * len(self._layer_messages)
        self._sent: dict[int | None, Pending] = {}
        self._loaded: dict[int, torch.cuda.Event | None] = {}
        self._received_of_layers: torch.cuda.Event | None = None
        self._warm_up()

    def _warm_up(self) -> None:
        """Serve a sequence of our own until its slots are full, so that no request waits.

        On a GPU the first launch of every kernel compiles or loads it, and memory is taken. On a
        CPU there is nothing to gain beyond the first step.
        """
        config, selector = self.config, self.selector
        on_gpu = self._device.type == "cuda"
        tokens = config.sink_tokens + config.recent_tokens + config.sparse_budget
        tokens = max(tokens, WARM_UP_TOKENS) if on_gpu else 1
        tokens = min(tokens, selector.capacity_tokens) or 1
        shipment = torch.zeros(
            bulk_shape(config, tokens), dtype=config.model.torch_dtype, device=self._device
        )
        sequence = selector.begin(NO_SEQUENCE)
        selector.load(sequence, shipment)
        wanted = config.slots_wanted_after(tokens)
        queries = config.query_window + 1 if on_gpu else 1
        while sequence.filled < wanted or sequence.queries < queries:
            rows = [Row(sequence.sequence_id, max(sequence.tokens, sequence.stepped))]
            self._warm_up_step(rows, refused=())
        if on_gpu:  # forecasts of many rows have a kernel of their own
            rows = [Row(NO_SEQUENCE, 0)] * config.max_rows
            self._warm_up_step(rows, refused=range(config.max_rows))
        if on_gpu and residency.shared_tail(config) is not None:
            selector.read_page(sequence.pages[0])
        selector.end(NO_SEQUENCE)
        if on_gpu:
            torch.cuda.synchronize(self._device)

    def _warm_up_step(self, rows: Sequence[Row], refused: Collection[int]) -> None:
        selector, messages = self.selector, self._messages.of(len(rows))
        step = selector.begin_step(0, rows, refused)
        for layer_message, up in zip(self._layer_messages, messages.up, strict=True):
            selector.serve(step, layer_message, up, messages.answer_of(layer_message))

    def load(self, message: Load) -> str | None:
        """Take over a bulk shipment; return the reason when it is refused.

        The tensor of a refused shipment is received and dropped, so that the channel stays in step;
        only a size that no inference rank ships is refused before.
        """
        config, selector = self.config, self.selector
        if not 0 < message.count <= selector.capacity_tokens:
            return f"Load of {message.count} tokens, {selector.capacity_tokens} fit"
        shape = bulk_shape(config, message.count)
        with self._receive_bulk(shape, config.model.torch_dtype) as shipment:
            return self._load(message, shipment)

    def _load(self, message: Load, shipment: Tensor) -> str | None:
        selector, sequence_id = self.selector, message.sequence_id
        is_new = message.start == 0 and sequence_id > self._last_sequence_id
        if is_new and not self._begin(sequence_id):
            return f"Load for sequence {sequence_id}: {self.config.max_rows} sequences are live"
        sequence = selector.sequences.get(sequence_id)
        if sequence is None:
            return f"Load for sequence {sequence_id}, which is not live"
        if sequence.tokens != message.start:
            held = sequence.tokens
            return f"Load at {message.start} for sequence {sequence_id}, which holds {held} tokens"
        selector.load(sequence, shipment)
        self._loaded[sequence_id] = self._mark()
        self._recorder.write("load", sequence_id=sequence_id, shipment=shipment)
        return None

    def _begin(self, sequence_id: int) -> bool:
        """Begin a sequence, unless too many are live."""
        if self.selector.is_full:
            return False
        self._last_sequence_id = sequence_id
        self.selector.begin(sequence_id)
        return True

    def adopt(self, message: Adopt) -> str | None:
        """Let a sequence begin with pages that are there; return the reason when it is refused."""
        selector, sequence_id = self.selector, message.sequence_id
        if sequence_id > self._last_sequence_id and not self._begin(sequence_id):
            return f"Adopt for sequence {sequence_id}: {self.config.max_rows} sequences are live"
        sequence = selector.sequences.get(sequence_id)
        if sequence is None:
            return f"Adopt for sequence {sequence_id}, which is not live"
        if unknown := [name for name in message.names if name not in selector.named]:
            return f"Adopt for sequence {sequence_id} of pages {unknown}, which there are not"
        if sequence.pages:
            return f"Adopt for sequence {sequence_id}, which holds {sequence.tokens} tokens"
        with self._link.in_background():  # behind the shipments that the pages came with
            if self._device.type == "cuda":
                # Steps of ended sequences may still write into the page that a copy gets.
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            selector.adopt(sequence, message.names)
            self._loaded[sequence_id] = self._mark()
        return None

    def share(self, message: Share) -> str | None:
        """Name pages of a sequence; return the reason when it is refused."""
        selector, sequence_id, names = self.selector, message.sequence_id, message.names
        sequence = selector.sequences.get(sequence_id)
        if sequence is None:
            return f"Share of sequence {sequence_id}, which is not live"
        if residency.shared_tail(self.config) is None:
            return f"Share of pages, which {self.config.kv_residency} does not"
        if len({*names} - selector.named.keys()) < len(names):
            return f"Share of sequence {sequence_id} by names {names}, some of which there are"
        if not selector.may_share(sequence, names):
            return f"Share of {len(names)} pages of sequence {sequence_id}, which are not complete"
        selector.share(sequence, names)
        return None

    def drop(self, names: Collection[int]) -> str | None:
        """Forget names of pages; return the reason when some of them were not known."""
        known = {name for name in names if name in self.selector.named}
        self.selector.drop(known)
        unknown = sorted({*names} - known)
        return f"Drop of pages {unknown}, which there are not" if unknown else None

    def restore(self, names: Sequence[int]) -> str | None:
        """Send pages back, decoded; return the reason when some of the names were not known.

        A page is read when the one before it is gone, or on a GPU on its way.
        """
        named = self.selector.named
        pages = [named[name] for name in names if name in named]
        tokens = PAGE_TOKENS * len(pages) if len(pages) == len(names) else 0
        with self._link.in_background():  # behind the shipments that the pages came with
            sent = self._link.bulk.send(torch.tensor([tokens], device=self._device))
            for page in pages if tokens else ():
                decoded = self.selector.read_page(page)
                sent.wait(PEER_SECONDS)
                sent = self._link.bulk.send(decoded)
            sent.wait(PEER_SECONDS)
        return None if tokens else f"Restore of pages {names}, some of which there are not"

    def load_projection(self, message: QueryProjection) -> str | None:
        """Take over by what a layer's queries are forecast; return the reason when it is refused.

        Nothing is received for a layer that no inference rank sends.
        """
        config = self.config
        if not config.forecasts or not 0 <= message.layer < config.model.layers:
            return f"QueryProjection of layer {message.layer}, which is not forecast"
        dtype = config.model.torch_dtype
        with self._receive_bulk(projection_shape(config), dtype) as projection:
            self.selector.load_projection(message.layer, projection)
            self._received_of_layers = self._mark()
            self._recorder.write("projection", layer=message.layer, projection=projection)
        return None

    def load_basis(self, message: KeyBasis) -> str | None:
        """Take over how a layer's keys are sketched; return the reason when it is refused.

        Nothing is received for a layer that no inference rank sends.
        """
        config = self.config
        if config.score_keys != "sketch" or not 0 <= message.layer < config.model.layers:
            return f"KeyBasis of layer {message.layer}, which has no sketch"
        with self._receive_bulk(basis_shape(config), torch.float32) as basis:
            self.selector.load_basis(message.layer, basis)
            self._received_of_layers = self._mark()
            self._recorder.write("basis", layer=message.layer, basis=basis)
        return None

    @contextlib.contextmanager
    def _receive_bulk(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """Receive a tensor, and run beside the steps what is done with it inside."""
        with self._link.in_background():
            received = torch.empty(shape, dtype=dtype, device=self._device)
            # Steps of ended sequences may still write into the pages that a shipment gets.
            after = torch.cuda.default_stream().record_event() if received.is_cuda else None
            self._link.bulk.receive(received, after).wait(PEER_SECONDS)
            yield received

    def end(self, sequence_ids: Collection[int]) -> str | None:
        """Forget sequences; return the reason when one of them was not live."""
        for sequence_id in sequence_ids:
            # A load that is under way still writes into pages and strategies that others get next.
            self._wait_for_load(sequence_id)
        unknown = [
            sequence_id for sequence_id in sequence_ids if not self.selector.end(sequence_id)
        ]
        return f"End of sequences {unknown}, which are not live" if unknown else None

    def flush(self) -> None:
        """Forget every sequence and every name."""
        self.end(list(self.selector.sequences))
        self.drop(list(self.selector.named))

    def step(self, message: Step) -> str | None:
        """Exchange one decode step; return the reason when rows of it were refused.

        A refused row gets an answer of no sequence, which changes nothing on the inference rank. A
        number of rows that no inference rank sends is refused before anything is received.
        """
        if not 0 < len(message.rows) <= self.config.max_rows:
            return f"Step of {len(message.rows)} rows, 1 to {self.config.max_rows} were agreed"
        refused = self._refused_rows(message)
        for row in message.rows:
            self._wait_for_load(row.sequence_id)
        if self._received_of_layers is not None:
            torch.cuda.current_stream().wait_event(self._received_of_layers)
            self._received_of_layers = None
        step = self.selector.begin_step(message.step, message.rows, refused.keys())
        self._timeline.enter_step(message.step, message.traced)
        messages = self._messages.of(len(message.rows))
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
        return "; ".join(refused.values()) or None

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
            sequences=len(self.selector.sequences),
            overflow_tokens=self._overflow_tokens,
            refused_messages=refused_messages,
        )

    def _mark(self) -> torch.cuda.Event | None:
        """An event behind what is queued; on a CPU, where nothing is, none."""
        return torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
