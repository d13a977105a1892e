"""The cache rank's computation: append, predict, score, select, gather, one message at a time.

The state of all sequences is in a few tensors, of the residency, the query ring and the slot map,
so that each operation is one kernel over all rows of a step. The selector knows no channels:
rank.py receives its inputs and sends its outputs.

Everything runs on one stream: the programs of a scoring fill the multiprocessors, and a selection
beside it would find hardly any room. What is queued for a group is captured in graphs, because the
host would take longer than the device: all that they read or write stays where it is from step to
step of as many rows and tokens. Not captured are appends of a format that queues more in some
steps, see `Residency.captures_append`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from cache_rank import residency
from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.copies import upload
from cache_rank.forecast import Forecast
from cache_rank.graphs import CudaGraphCache
from cache_rank.kernels.checksum.reference import slots_checksum
from cache_rank.kernels.rows import PagedRows, Shipment, ShippedRow
from cache_rank.kernels.select.reference import EMPTY
from cache_rank.measure.timeline import Timeline
from cache_rank.named_pages import HostTier, NamedPages
from cache_rank.pages import PAGE_TOKENS, PageAllocator
from cache_rank.protocol import (
    NO_SEQUENCE,
    AnswerHeader,
    AttendedMessage,
    DownMessage,
    Row,
    UpMessage,
)
from cache_rank.query_ring import QueryRing
from cache_rank.resident_sequence import ResidentSequence
from cache_rank.schedule import LayerMessage
from cache_rank.selector_step import REFUSED_ROW, RowNumbers, SelectorStep
from cache_rank.slot_map import SlotMap

_CHECKSUM = AnswerHeader._fields.index("checksum")
_SHIPPED = AnswerHeader._fields.index("shipped_tokens")

_PAGES_ROUNDING = 16
"""On a GPU, the pages of a step are rounded up to a multiple of this: a graph serves many steps."""

_STEP_BYTES = 1024
"""A row of a step uploads fewer bytes than this beside its pages."""


class Selector:
    """All sequences of one cache rank.

    Attributes:
        sequences: the live sequences, by id.
        pages: the pages of the resident memory.
        named: pages that have a name: their tokens are complete; sequences may share them.
        overflow: () int64, tokens that had to wait for a later step, summed over layers and heads.
        capacity_tokens, host_tokens: how many tokens fit, and how many more that no sequence has.
        timeline: marked after each part of what a message asks for.
    """

    def __init__(
        self,
        config: CacheRankConfig,
        device: torch.device,
        memory_bytes: int,
        host_bytes: int = 0,
        trace: str = "",
    ) -> None:
        """Take about `memory_bytes` for resident tokens, and some for working memory beside.

        Args:
            host_bytes: memory of the host for pages that no sequence has.
            trace: the file that the timeline is appended to, if any.

        Raises:
            ValueError: the host's memory cannot be had.
        """
        slots = config.max_rows
        self.config = config
        self.sequences: dict[int, ResidentSequence] = {}
        self.pages = PageAllocator(residency.pages_in(config, memory_bytes))
        self.capacity_tokens = residency.capacity_tokens(config, memory_bytes)
        self.overflow = torch.zeros((), dtype=torch.int64, device=device)
        self.timeline = Timeline(trace, device, config.layer_messages)
        self._device = device
        self._page_bytes = PAGE_TOKENS * residency.bytes_per_token(config)
        shares = residency.shared_tail(config) is not None
        host_pages = host_bytes // self._page_bytes if shares else 0
        self.host_tokens = PAGE_TOKENS * host_pages
        self._spare_page = self.pages.pages  # pages of the host are read there
        self._residency = residency.create(config, self.pages.pages + bool(host_pages), device)
        host = HostTier(self._residency.page_memory() if host_pages else (), host_pages)
        self.named = NamedPages(self.pages, host)
        self._tail_tokens = residency.shared_tail(config) or 0
        self._free_slots = list(range(slots))[::-1]
        # Pages of the sequence in each slot, so that no step builds its page table from lists.
        self._slot_pages = torch.zeros((slots, max(1, self.pages.pages)), dtype=torch.int32)
        self._graphs = CudaGraphCache(device)
        self._step_memory: Tensor | None = None
        if device.type == "cuda":
            step_bytes = slots * (_STEP_BYTES + 4 * (self.pages.pages + _PAGES_ROUNDING))
            self._step_memory = torch.empty(step_bytes, dtype=torch.uint8, device=device)
        self._queries = QueryRing(config, device)
        self._forecast = Forecast(config, device) if config.forecasts else None
        self._slot_map = SlotMap(config, device)

    @property
    def tokens_held(self) -> int:
        """Tokens resident now, those of shared pages once."""
        own = sum(
            max(0, sequence.tokens - PAGE_TOKENS * sequence.shared)
            for sequence in self.sequences.values()
        )
        return own + PAGE_TOKENS * len(self.named)

    @property
    def tokens_kept(self) -> int:
        """Tokens of pages that no sequence has."""
        return PAGE_TOKENS * self.named.unused

    @property
    def tokens_on_host(self) -> int:
        """Tokens of pages that lie on the host."""
        return PAGE_TOKENS * self.named.on_host

    @property
    def bytes_held(self) -> int:
        """Memory of the pages in use."""
        return (self.pages.pages - self.pages.free) * self._page_bytes

    @property
    def is_full(self) -> bool:
        return not self._free_slots

    def begin(self, sequence_id: int) -> ResidentSequence:
        slot = self._free_slots.pop()
        self._slot_map.tokens[slot].fill_(EMPTY)
        self.sequences[sequence_id] = ResidentSequence(sequence_id, slot)
        return self.sequences[sequence_id]

    def end(self, sequence_id: int) -> bool:
        """Forget a sequence; whether it was live."""
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        self._residency.end(sequence.slot)
        self.pages.give_back(sequence.pages)
        self._free_slots.append(sequence.slot)
        return True

    def load(self, sequence: ResidentSequence, tokens: Tensor) -> None:
        """Add tokens of a sequence, (2, layers, n, Hkv, D)."""
        self.load_together([(sequence, 0, tokens.shape[2])], tokens)

    def load_together(
        self, parts: Sequence[tuple[ResidentSequence, int, int]], tokens: Tensor
    ) -> None:
        """Add tokens of some sequences: to each, so many from one of `tokens` on."""
        tails, others = [], []
        for sequence, first, count in parts:
            start = sequence.tokens
            sequence.tokens += count
            self._extend(sequence, sequence.tokens)
            tail = min(max(0, sequence.complete - start), count)
            if tail:
                tails.append(ShippedRow(sequence.slot, start, first, tail))
            if tail < count:
                rest = start + tail, first + tail, count - tail
                others.append(ShippedRow(sequence.slot, *rest))
        if tails:
            self._residency.load_tail(self._shipment(tokens, tails))
        if others:
            self._residency.load(self._shipment(tokens, others))

    def _shipment(self, tokens: Tensor, rows: Sequence[ShippedRow]) -> Shipment:
        last = max(row.position + row.tokens for row in rows) - 1
        slots = [row.slot for row in rows]
        table = self._slot_pages[slots, : last // PAGE_TOKENS + 1]
        return Shipment.of(tokens, table, rows)

    def may_load_pages(self, sequence: ResidentSequence, start: int) -> bool:
        """Whether a sequence may go on with complete pages, which begin at `start`."""
        tokens = max(0, sequence.complete - self._tail_tokens)
        return sequence.complete == start and sequence.tokens == tokens

    def load_pages(self, sequence: ResidentSequence, count: int, packed: Tensor) -> None:
        """Add complete pages of a prompt, of `count` tokens, as a `PageEncoder` has packed them.

        What comes next are pages again, or tokens from `residency.shared_tail` before their end.
        """
        first = sequence.complete // PAGE_TOKENS
        sequence.complete += count
        sequence.tokens = sequence.complete - self._tail_tokens
        self._extend(sequence, sequence.complete)
        (pages,) = upload((self._pages_on_host(sequence)[first:].long(),), self._device)
        self._residency.load_pages(pages, packed)

    def adopt(self, sequence: ResidentSequence, names: Sequence[int]) -> None:
        """Let a sequence that holds nothing begin with pages of these names."""
        pages = self.named.use(names)
        sequence.complete = PAGE_TOKENS * len(pages)
        sequence.shared = len(pages)
        tail = self._tail_tokens if pages else 0
        sequence.tokens = sequence.complete - tail
        if tail:  # the last page is written again, from tokens that are newest until then
            sequence.shared -= 1
            sequence.copied = 1
            (own,) = self.named.take(1)
            self._residency.copy_page(pages[-1], own)
            self.pages.give_back([pages.pop()])
            pages.append(own)
        self._add_pages(sequence, pages)

    def may_share(self, sequence: ResidentSequence, names: Sequence[int]) -> bool:
        """Whether the next pages of a sequence are complete, for ever."""
        first = self._first_to_share(sequence)
        return PAGE_TOKENS * (first + len(names)) + self._tail_tokens <= sequence.tokens

    def share(self, sequence: ResidentSequence, names: Sequence[int]) -> None:
        """Name the next pages of a sequence, which are complete, and hold them."""
        first = self._first_to_share(sequence)
        self.named.name(names, sequence.pages[first : first + len(names)])
        sequence.shared += len(names)

    def _first_to_share(self, sequence: ResidentSequence) -> int:
        """The first page that has no name, nor is the copy of one that has."""
        return sequence.shared + sequence.copied

    def pack_named(self, name: int) -> Tensor:
        """Copy the page of a name, see `Residency.pack_page`."""
        return self._residency.pack_page(self.named.read(name, self._spare_page))

    def load_projection(self, layer: int, projection: Tensor) -> None:
        """Take over by what a layer's queries are forecast, (H + 2, Hq, D)."""
        if self._forecast is not None:
            self._forecast.load(layer, projection)

    def load_basis(self, layer: int, basis: Tensor) -> None:
        """Take over how a layer's keys are sketched, (Hkv, D + 1, D)."""
        self._residency.load_basis(layer, basis)

    def attended(self, rows: Sequence[Row]) -> BatchMetadata:
        """Rows that attend to all tokens that their sequences, which are live, hold."""
        sequences = [self.sequences[row.sequence_id] for row in rows]
        on_host = [(sequence.slot, sequence.tokens - 1) for sequence in sequences]
        slots, positions = torch.tensor(on_host, dtype=torch.int32).unbind(1)
        width = max(len(sequence.pages) for sequence in sequences)
        table = self._slot_pages[slots.long(), :width]
        table, slots, positions = upload((table, slots, positions), self._device)
        capacity = 1 + max(position for _, position in on_host)
        paged = PagedRows(table, slots, positions)
        return BatchMetadata(paged, slots, slots, slots, capacity, on_host)

    def attend(
        self, rows: BatchMetadata, layer: int, queries: Tensor, answer: AttendedMessage
    ) -> None:
        """Attend with queries (R, Q, Hq, D) to what is held, and write the answer."""
        self._residency.attend(rows, layer, queries, answer.outputs, answer.log_sums)

    def begin_step(
        self,
        number: int,
        rows: Sequence[Row],
        refused: Collection[int] = (),
    ) -> SelectorStep:
        """Begin a step over rows, of which some are refused by index; all others are live."""
        live = [
            (index, row, self.sequences[row.sequence_id])
            for index, row in enumerate(rows)
            if index not in refused
        ]
        count = len(rows)
        by_row = [REFUSED_ROW] * count
        header = [(NO_SEQUENCE,) * len(AnswerHeader._fields)] * count
        fresh_header = list(header)
        for index, row, sequence in live:
            position, newest_before = row.position, sequence.tokens - 1
            sequence.advance(self.config, position)
            self._extend(sequence, sequence.tokens)
            newest, budget_after = sequence.tokens - 1, self.config.budget_after
            by_row[index] = RowNumbers(
                slot=sequence.slot,
                queries=sequence.queries,
                position=position,
                newest=newest,
                newest_before=newest_before,
                budget=budget_after(newest),
                budget_before=budget_after(newest_before),
            )
            of_row = (number, row.sequence_id)
            header[index] = (*of_row, position + 1, sequence.filled, 0, 0)
            fresh_header[index] = (*of_row, position, sequence.fresh_filled, 0, 0)
        host = RowNumbers(*zip(*by_row, strict=True))
        width = max((len(sequence.pages) for _, _, sequence in live), default=1)
        on_gpu = self._step_memory is not None
        if on_gpu:
            width = -(-width // _PAGES_ROUNDING) * _PAGES_ROUNDING
        page_table = self._slot_pages[[max(slot, 0) for slot in host.slot], :width]
        numbers = torch.tensor(host, dtype=torch.int32)
        on_host = (numbers, page_table, torch.tensor((header, fresh_header)))
        changed = self._slot_map.changed[:, :count].zero_()
        capacity = width * PAGE_TOKENS if on_gpu else max(host.newest) + 1
        numbers, table, headers = upload(on_host, self._device, self._step_memory)
        device = RowNumbers(*numbers)

        def rows_at(
            positions: Tensor, places: Sequence[int], budgets: Tensor, header: Tensor
        ) -> BatchMetadata:
            on_host = list(zip(host.slot, places, strict=True))
            paged = PagedRows(table, device.slot, positions)
            return BatchMetadata(paged, device.queries, budgets, header, capacity, on_host)

        current = rows_at(device.position, host.position, device.budget, headers[0])
        after = rows_at(device.newest, host.newest, device.budget, headers[0])
        before = device.newest_before, host.newest_before, device.budget_before
        earlier = rows_at(*before, headers[1])
        self._graphs.allow_more()
        scores = self._residency.scores
        moves = scores.moves
        scores.take(count, len(self.config.groups[0]), capacity)
        if scores.moves > moves:
            self._graphs.clear()
        return SelectorStep(number, current, after, earlier, (count, width), live, changed)

    def serve(
        self,
        step: SelectorStep,
        layer_message: LayerMessage,
        up: UpMessage,
        down: DownMessage | None,
    ) -> None:
        """Take over what a message brought, and lay out the answer.

        What is queued is one graph, which reads `up` and writes `down` when it runs. Messages come
        in the order of `config.layer_messages`.
        """
        messages = [message.buffer.data_ptr() for message in (up, down) if message is not None]
        key = (layer_message, step.key, self._forecasts(layer_message), *messages)
        append = partial(self._append, step, layer_message, up)
        answer = partial(self._answer, step, layer_message, up, down)
        if self._residency.captures_append:
            self._graphs.run(key, append, answer)
        else:
            append()
            self._graphs.run(key, answer)
        if self.config.checksum and down is not None:
            self._add_checksums(step, layer_message, down)

    def _append(self, step: SelectorStep, layer_message: LayerMessage, up: UpMessage) -> None:
        """Take over the tokens of a group, if the message brought some."""
        if layer_message.kv_of is not None:
            layers = self.config.groups[layer_message.kv_of]
            if self.config.draft_steps:
                self._queries.append(step.rows, layers, up.tokens)
            else:
                self._residency.append(step.rows, layers, up.tokens, self._queries.entries)
            self.timeline.mark(layer_message, "append")

    def _answer(
        self,
        step: SelectorStep,
        layer_message: LayerMessage,
        up: UpMessage,
        down: DownMessage | None,
    ) -> None:
        """Choose the tokens that a group attends to, if an answer is due, and lay out changes."""
        group = layer_message.selects_for
        if group is None or down is None:
            return
        rows, layers = step.rows_of(layer_message), self.config.groups[group]
        changed, mark = step.changed[group], partial(self.timeline.mark, layer_message)
        queries = self._predict(step, layer_message, group, up)
        mark("predict")
        scores = self._residency.score(rows, layers, queries, chosen=self._slot_map.tokens)
        mark("score")
        self._slot_map.select(rows, layers, scores, down.slots, changed)
        mark("select")
        entering = self._slot_map.entering(down.slots)
        self._residency.gather(rows, layers, entering, down.keys, down.values)
        down.header.copy_(rows.header)
        down.header[:, _SHIPPED] += changed[:, 0]  # 0 so far; refused rows stay
        mark("gather")

    def _predict(
        self, step: SelectorStep, layer_message: LayerMessage, group: int, up: UpMessage
    ) -> Tensor:
        """The queries by which a group is selected for, (R, L, Hq, D) float32."""
        if self._forecast is not None and self._forecasts(layer_message):
            return self._forecast.predict(step.rows, group, up.hidden, layer_message.same_step)
        return self._queries.predict(step.rows, self.config.groups[group])

    def _forecasts(self, layer_message: LayerMessage) -> bool:
        """Whether a message is answered by forecasts; the first groups need projections."""
        if self._forecast is None or layer_message.selects_for is None:
            return False
        return layer_message.same_step or self._forecast.knows(layer_message.selects_for)

    def end_step(self, step: SelectorStep) -> None:
        """Account for what the answers to all groups could not ship, and check what came."""
        self.overflow += step.changed[..., 1].sum()
        self._residency.check()

    def slot_map(self, sequence: ResidentSequence, layers: range) -> Tensor:
        """Which token sits in which slot, (len(layers), Hkv, k) int32; a view."""
        return self._slot_map.tokens[sequence.slot, layers.start : layers.stop]

    def _extend(self, sequence: ResidentSequence, tokens: int) -> None:
        missing = -(-tokens // PAGE_TOKENS) - len(sequence.pages)
        if missing > 0:
            self._add_pages(sequence, self.named.take(missing))

    def _add_pages(self, sequence: ResidentSequence, new: list[int]) -> None:
        held = len(sequence.pages)
        sequence.pages += new
        pages = torch.tensor(new, dtype=torch.int32)
        self._slot_pages[sequence.slot, held : held + len(new)] = pages

    def _pages_on_host(self, sequence: ResidentSequence) -> Tensor:
        return self._slot_pages[sequence.slot, : len(sequence.pages)]

    def _add_checksums(
        self, step: SelectorStep, layer_message: LayerMessage, down: DownMessage
    ) -> None:
        """Put into an answer what its slots hold."""
        layers = self.config.groups[layer_message.selects_for or 0]
        for index, _, sequence in step.live:
            _, newest = step.rows_of(layer_message).on_host[index]
            chosen, pages = self.slot_map(sequence, layers), self._pages_on_host(sequence)
            rows = BatchMetadata.of_one(pages, sequence.slot, newest, self._device)
            slots = self._residency.read(rows, layers, chosen)
            filled = sequence.fresh_filled if layer_message.same_step else sequence.filled
            keys, values = (part[..., :filled, :] for part in slots)
            down.header[index, _CHECKSUM] = slots_checksum(keys, values)
