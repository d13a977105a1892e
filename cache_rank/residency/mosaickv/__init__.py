"""`mosaickv`: rotated keys and values, of which each keeps its largest elements (MosaicKV 4-5).

segments    which strategy each token of a sequence has, and when
strategy    how the tokens of a segment are compressed
memory      pages of packed vectors, rings of newest tokens, tables of strategies, a thread

How tokens are scored and decoded is specified in kernels/mosaickv/reference.py. The paper's
GPU-side compression buffer is the pages, and its CPU-side buffer the rings of newest tokens, which
hold the newest segments in full precision: here, too, on the device.

Scores and gathers are the same work in every step, and run from captured graphs. Appends are not:
the host decides when segments end, and queues their compression.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.append import append_step, load_tokens
from cache_rank.kernels.mosaickv import attend_packed, gather_packed, score_packed_step
from cache_rank.kernels.mosaickv.reference import PackedWorkspace, packed_workspace
from cache_rank.kernels.newest.reference import attend_to, merge
from cache_rank.kernels.rows import Shipment, ShippedRow
from cache_rank.residency.base import Residency
from cache_rank.residency.mosaickv.memory import PackedMemory
from cache_rank.residency.mosaickv.segments import OPENING_TOKENS, Segments
from cache_rank.residency.mosaickv.strategy import Compression
from cache_rank.residency.options import Between, OneOf, Ranges


class MosaicKVResidency(Residency):
    """Codes in pages, and the segments of each slot and its newest tokens beside them.

    Its options are which strategies there are, and which segments have them:

        rate        percent of its elements that a vector loses
        group       neighbouring elements that are kept together
        dropped     percent of the rotated channels that all vectors lose, those of least energy
        loss        largest share of energy that a rate and a group may lose to be chosen
        segment     most tokens of a segment: longer ones take more memory a slot, for the copy in
                    full precision, and shorter ones more memory a token, for their rotations
        threshold   accumulated loss that ends a segment, in tokens that are lost altogether

    With `auto`, each layer of each segment has the one that compresses most within `loss`, and
    memory is reserved for the one that compresses least.

    The paper drops a quarter of the channels and scores blocks first (sections 5.2 and 4.2). Both
    together lost a fifth of the recall on the keys of a language model, and an eighth of the
    attention. So no channels are dropped by default, and every token is scored by its own key.
    """

    name: ClassVar[str] = "mosaickv"
    options: ClassVar[Ranges] = {
        "rate": OneOf(("auto", 0, 62.5, 75, 87.5)),
        "group": OneOf(("auto", 1, 2, 4)),
        "dropped": Between(0, 75, default=0),
        "loss": Between(0, 1, default=0.05),
        "segment": OneOf((8192, 512, 1024, 2048, 4096, 16384, 32768, 65536)),
        "threshold": Between(0, 65536, default=1024),
    }
    captures_append: ClassVar[bool] = False

    @classmethod
    def tail_tokens(cls) -> None:
        """None: a page means nothing without the segments of its slot, and where these end depends
        on the whole sequence."""

    @classmethod
    def bytes_per_token(cls, config: CacheRankConfig) -> int:
        return cls._compression(config).token_bytes

    @classmethod
    def fixed_bytes(cls, config: CacheRankConfig) -> int:
        return config.max_rows * cls._compression(config).slot_bytes

    @classmethod
    def _compression(cls, config: CacheRankConfig) -> Compression:
        return Compression(cls.settings(config.kv_residency_options), config.model)

    def __init__(self, config: CacheRankConfig, pages: int, device: torch.device) -> None:
        super().__init__(config, pages, device)
        self._memory = PackedMemory(self._compression(config), config, pages, device)
        self._segments: dict[int, Segments] = {}

    def _load(self, shipment: Shipment) -> None:
        every_layer, rings = range(self._model.layers), self._memory.store.rings
        for row, (slot, start, first, count) in enumerate(shipment.on_host):
            if start == 0:
                self._begin(slot)
            segments, pages = self._segments[slot], shipment.rows.page_table[row]
            begin, stop = start, start + count
            while begin < stop:  # what is compressed next may still lie where later tokens go
                end = segments.at_once(begin, stop)
                part = ShippedRow(slot, begin, first + begin - start, end - begin)
                ring = torch.tensor([[slot]], dtype=torch.int32)
                load_tokens(Shipment.of(shipment.tokens, ring, [part]), *rings)
                segments.append(pages, every_layer, begin, end)
                begin = end

    def _append(self, rows: BatchMetadata, layers: range, up: Tensor, query_ring: Tensor) -> None:
        for slot, position in rows.on_host:
            if slot >= 0 and position == 0 and layers.start == 0:
                self._begin(slot)
        append_step(
            up,
            *self._memory.store.rings,
            query_ring,
            rows.paged._replace(page_table=rows.slots.unsqueeze(1)),
            layers.start,
        )
        for row, (slot, position) in enumerate(rows.on_host):
            if slot >= 0:
                pages = rows.paged.page_table[row]
                self._segments[slot].append(pages, layers, position, position + 1)

    def _score(
        self, rows: BatchMetadata, layers: range, queries: Tensor, workspace: Any, out: Tensor
    ) -> None:
        place, scale = (rows.paged, layers.start), self._model.scale
        score_packed_step(self._memory.store, queries, *place, scale, workspace, out)

    def gather(
        self, rows: BatchMetadata, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        gather_packed(self._memory.store, rows.paged, layers.start, entering, keys, values)

    def attend(
        self, rows: BatchMetadata, layer: int, queries: Tensor, out: Tensor, log_sums: Tensor
    ) -> None:
        """See `Residency.attend`. Channels that vectors have lost are attended to as zeros."""
        store, scale = self._memory.store, self._model.scale
        of_packed = attend_packed(store, queries, rows.paged, layer, scale)
        # Fewer than an opening are in no page.
        slots = rows.slots.clamp(min=0).long()
        held = torch.where(rows.slots < 0, 0, rows.positions + 1)
        newest = torch.arange(OPENING_TOKENS, device=held.device)
        newest = newest + store.packed_tokens(slots, held)[:, None]
        entries = newest % store.rings[0].shape[3]
        keys, values = (
            ring[slots[:, None], layer, :, entries].transpose(1, 2) for ring in store.rings
        )
        is_seen = (newest < held[:, None]).unsqueeze(1)
        found = merge(of_packed, attend_to(queries, keys, values, is_seen, scale))
        out.copy_(found[0])
        log_sums.copy_(found[1])

    def end(self, slot: int) -> None:
        if (ended := self._segments.pop(slot, None)) is not None:
            ended.end()

    def check(self) -> None:
        self._memory.not_finite.check()

    def score_workspace(self, rows: int, layers: int, capacity: int) -> PackedWorkspace:
        scores = super().score_workspace(rows, layers, capacity)
        model = self._model
        units, group = rows * layers * model.kv_heads, model.query_heads // model.kv_heads
        strategies = self._memory.compression.most_strategies(capacity)
        return packed_workspace(self._memory.store, scores, units, group, strategies)

    def _begin(self, slot: int) -> None:
        self.end(slot)
        self._segments[slot] = Segments(self._memory, slot)
