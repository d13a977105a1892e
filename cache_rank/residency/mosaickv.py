"""`mosaickv`: rotated keys and values of which each keeps its largest elements (MosaicKV 4-5).

Tokens are compressed by a strategy of their segment, see `mosaickv_segments`; their codes are in
pages, laid out for the largest of the configured strategies. Scores go from blocks to tokens: all
blocks are scored by their mean keys, and then the tokens of the best blocks by their own keys. A
token elsewhere keeps the logit of its block, which is a better guess than none, for itself and for
the sum that probabilities are relative to. What is shipped is decoded.

The paper's GPU-side compression buffer is the pages, and its CPU-side buffer the full-precision
copy of the newest segments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import torch
from cache_rank_kernels.fp8.reference import convert
from cache_rank_kernels.mosaickv.reference import decode, score_packed
from torch import Tensor

from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.mosaickv_pages import PackedPages
from cache_rank.residency.mosaickv_segments import (
    BUFFER_TOKENS,
    Run,
    SegmentLengths,
    Segments,
)
from cache_rank.residency.mosaickv_strategy import Candidates, strategy_bytes
from cache_rank.residency.options import Between, OneOf, Ranges, require_options

if TYPE_CHECKING:
    from cache_rank.residency import StepRows

OPTIONS: Ranges = {
    "rate": OneOf(("auto", 0, 62.5, 75, 87.5)),
    "group": OneOf(("auto", 1, 2, 4)),
    "block": OneOf(("auto", 1, 4, 8, 16)),
    "dropped": Between(0, 75),
    "loss": Between(0, 1),
    "variance": Between(0, 1),
    "segment": OneOf(tuple(1 << exponent for exponent in range(9, 17))),
    "threshold": Between(0, 65536),
    "scored": Between(0, 100),
}
"""Of the strategies that there are, of the segments that have them, and of scoring.

    rate        percent of its elements that a vector loses
    group       neighbouring elements that are kept together
    block       tokens of a per-block key; 1 is none
    dropped     percent of the rotated channels that all vectors lose, those of least energy
    loss        largest share of energy that a rate and a group may lose to be chosen
    variance    largest share of the variance of keys within blocks that may be chosen
    segment     most tokens of a segment: longer ones take more memory a slot, for the copy in full
                precision, and shorter ones more memory a token, for their rotations
    threshold   accumulated loss that ends a segment, in tokens that are lost altogether
    scored      percent of the tokens that are scored one by one, those of the best blocks; never
                fewer than can be selected

With `auto`, each layer of each segment has the one that compresses most within `loss` or within
`variance`, and memory is reserved for the one that compresses least.
"""

_TILE_TOKENS = 4096
"""Tokens of one sequence that are unpacked at once for scoring."""

_DECODED_TOKENS = 512
"""Tokens that are decoded at once, each beside a copy of its rotation."""


class MosaicKVResidency:
    """Codes in pages, and in host memory the segments of each slot and a copy of the newest."""

    lossless: ClassVar[bool] = False
    runs_on_gpu: ClassVar[bool] = False

    @staticmethod
    def validate(options: Mapping[str, OptionValue]) -> None:
        require_options("mosaickv", options, OPTIONS)

    @staticmethod
    def bytes_per_token(config: CacheRankConfig) -> int:
        """With the strategies of segments, which are of `SegmentLengths.least` tokens or more."""
        candidates = Candidates(config.kv_residency_options, config.model)
        strategies = strategy_bytes(candidates.channels, config.model)
        of_token = -(-strategies // _segment_lengths(config).least)
        return PackedPages.bytes_per_token(candidates, config.model) + of_token

    @staticmethod
    def fixed_bytes(config: CacheRankConfig) -> int:
        """As if every slot had its longest segment, and that were just being compressed again."""
        model, lengths = config.model, _segment_lengths(config)
        candidates = Candidates(config.kv_residency_options, model)
        covariance = 2 * model.layers * model.kv_heads * model.head_dim**2 * 8
        of_slot = (
            lengths.originals * model.bytes_per_token
            + lengths.most * PackedPages.bytes_per_token(candidates, model)
            + 3 * covariance  # of the finished segment, and of the next one now and a buffer ago
            + strategy_bytes(candidates.channels, model)  # of the opening
        )
        return config.max_rows * of_slot

    def __init__(self, config: CacheRankConfig, pages: int, device: torch.device) -> None:
        model, options = config.model, config.kv_residency_options
        self.page_bytes = PAGE_TOKENS * self.bytes_per_token(config)
        self._model = model
        self._lengths = _segment_lengths(config)
        self._candidates = Candidates(options, model)
        self._pages = PackedPages(self._candidates, model, pages, device)
        self._scored_share = float(options.get("scored", 25)) / 100
        self._least_scored = config.sparse_budget + config.selection_margin
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mosaickv")
        self._segments: dict[int, Segments] = {}
        self._holders: dict[int, int] = {}  # the slot that a page was last written for

    def load(self, pages: Tensor, slot: int, start: int, shipment: Tensor) -> None:
        every_layer = range(self._model.layers)
        stop = start + shipment.shape[2]
        for first in range(start - start % BUFFER_TOKENS, stop, BUFFER_TOKENS):
            begin, end = max(first, start), min(first + BUFFER_TOKENS, stop)
            tokens = shipment[:, :, begin - start : end - start].transpose(2, 3)
            self._take(pages, slot, every_layer, begin, tokens)

    def append(self, rows: StepRows, layers: range, up: Tensor, query_ring: Tensor) -> None:
        model = self._model
        heads = (model.query_heads, model.kv_heads, model.kv_heads)
        queries, keys, values = up.split(heads, dim=2)
        for row, (slot, position) in enumerate(
            zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        ):
            if slot < 0:
                continue
            entry = position % query_ring.shape[3]
            query_ring[slot, layers.start : layers.stop, :, entry] = queries[row]
            tokens = torch.stack((keys[row], values[row])).unsqueeze(3)  # (2, L, Hkv, 1, D)
            self._take(rows.page_table[row], slot, layers, position, tokens)

    def truncate(self, pages: Tensor, slot: int, tokens: int) -> None:
        for layer, start, compressed in self._segments[slot].truncate(tokens):
            self._pages.write(pages, layer, start, compressed)
        for page in pages[-(-tokens // PAGE_TOKENS) :].tolist():
            if self._holders.get(page) == slot:
                del self._holders[page]  # it may serve another sequence while this one goes on

    def prepare(self, rows: int, layers: int, capacity: int) -> int:
        return 0  # scores take new memory every time

    def check(self) -> None:
        """What cannot be held is refused as it comes."""

    def score(self, rows: StepRows, layers: range, queries: Tensor, exact: bool = False) -> Tensor:
        shape = (queries.shape[0], len(layers), self._model.kv_heads, rows.capacity)
        out = torch.empty(shape, dtype=torch.float32)
        grouped = queries.unflatten(2, (self._model.kv_heads, -1))  # (R, L, Hkv, G, D)
        for row, (slot, position) in enumerate(
            zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        ):
            for index, layer in enumerate(layers if slot >= 0 else ()):
                logits = self._logits(
                    grouped[row, index], rows.page_table[row], slot, layer, position + 1, exact
                )
                out[row, index, :, : position + 1] = _scores(logits)
        return out

    def gather(
        self, rows: StepRows, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        used = (entering >= 0) & (rows.slots >= 0).view(-1, 1, 1, 1)
        for row, index in used.flatten(2).any(dim=-1).nonzero().tolist():
            head, entry = used[row, index].nonzero(as_tuple=True)
            found = self._tokens(
                rows.page_table[row],
                int(rows.slots[row]),
                layers[index],
                head,
                entering[row, index, head, entry].to(torch.int64),
            )
            for out, part in zip((keys, values), found, strict=True):
                out[row, index, head, entry] = convert(part, out.dtype)

    def read(
        self, pages: Tensor, slot: int, layers: range, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = (*positions.shape, self._model.head_dim)
        head = torch.arange(self._model.kv_heads).unsqueeze(-1).expand(positions.shape[1:])
        found = [
            self._tokens(pages, slot, layer, head.flatten(), of_layer.flatten())
            for layer, of_layer in zip(layers, positions, strict=True)
        ]
        keys, values = torch.stack(found, dim=1)
        return keys.view(shape), values.view(shape)

    def _take(self, pages: Tensor, slot: int, layers: range, first: int, tokens: Tensor) -> None:
        """Take over tokens, (2, len(layers), Hkv, n, D), that end with a buffer or before."""
        if first == 0 and (slot not in self._segments or self._segments[slot].resident[layers[0]]):
            self._forget(slot)
            self._segments[slot] = Segments(
                self._model, self._candidates, self._lengths, self._executor
            )
        self._hold(int(pages[first // PAGE_TOKENS]), slot)
        for layer, start, compressed in self._segments[slot].append(layers, first, tokens):
            self._pages.write(pages, layer, start, compressed)

    def _hold(self, page: int, slot: int) -> None:
        """A page that another sequence writes to says that the one that had it has ended."""
        if (holder := self._holders.get(page, slot)) != slot:
            self._forget(holder)
        self._holders[page] = slot

    def _forget(self, slot: int) -> None:
        if (ended := self._segments.pop(slot, None)) is not None:
            ended.end()
        self._holders = {page: holder for page, holder in self._holders.items() if holder != slot}

    def _tokens(
        self, pages: Tensor, slot: int, layer: int, head: Tensor, position: Tensor
    ) -> Tensor:
        """Tokens of a layer, each of a head and position of its own: (2, n, D) in pool dtype."""
        segments, model = self._segments[slot], self._model
        out = torch.empty((2, len(head), model.head_dim), dtype=model.torch_dtype)
        packed = segments.packed_tokens(layer)
        recent = (position >= packed).nonzero().squeeze(-1)
        if len(recent):
            newest = segments.newest(layer, packed, segments.resident[layer])
            out[:, recent] = newest[:, head[recent], position[recent] - packed]
        coded = (position < packed).nonzero().squeeze(-1)
        for index, strategy in segments.strategies(layer, position[coded]):
            for part in coded[index].split(_DECODED_TOKENS):
                # One product a token, so that no bit of it depends on what else is asked for.
                of_token = head[part].unsqueeze(-1), position[part].unsqueeze(-1)
                both = self._pages.tokens(pages, layer, *of_token, strategy)
                for side, (rotation, vectors) in enumerate(
                    zip(strategy.rotations, both, strict=True)
                ):
                    tokens = decode(vectors, rotation[head[part]], strategy.group)
                    out[side, part] = self._to_pool_dtype(tokens.squeeze(1))
        return out

    def _logits(
        self, queries: Tensor, pages: Tensor, slot: int, layer: int, resident: int, exact: bool
    ) -> Tensor:
        """Logits of a sequence's first tokens, (Hkv, G, resident); queries (Hkv, G, D)."""
        segments, scale = self._segments[slot], self._model.scale
        packed = min(segments.packed_tokens(layer), resident)
        runs = list(segments.runs(layer, packed, _TILE_TOKENS))
        wanted = max(math.ceil(resident * self._scored_share), self._least_scored)
        by_token = exact or wanted >= packed
        logits = []
        for run in runs:
            in_blocks = not by_token and run.strategy.block > 1
            score_run = self._score_blocks if in_blocks else self._score_tokens
            logits.append(score_run(queries, pages, layer, run))
        if packed < resident:
            keys = segments.newest(layer, packed, resident)[0].float()
            logits.append((queries @ keys.transpose(-1, -2)) * scale)
        together = torch.cat(logits, dim=-1)
        if not by_token:
            self._refine(together, queries, pages, layer, runs, wanted)
        return together

    def _score_tokens(self, queries: Tensor, pages: Tensor, layer: int, run: Run) -> Tensor:
        """Logits of a run by the keys of its tokens: (Hkv, G, n)."""
        head = torch.arange(self._model.kv_heads).unsqueeze(-1)
        position = torch.arange(run.first, run.last)
        keys = self._pages.keys(pages, layer, head, position, run.strategy)
        rotation, group = run.strategy.rotations[0], run.strategy.group
        return score_packed(queries, keys, rotation, group, self._model.scale)

    def _score_blocks(self, queries: Tensor, pages: Tensor, layer: int, run: Run) -> Tensor:
        """Logits of a run by the keys of its blocks, one for each of their tokens: (Hkv, G, n)."""
        strategy = run.strategy
        position = torch.arange(run.first, run.last, strategy.block)
        keys = self._pages.block_keys(pages, layer, position, strategy)
        logits = score_packed(
            queries, keys, strategy.rotations[0], strategy.group, self._model.scale
        )
        return logits.repeat_interleave(strategy.block, dim=-1)[..., : run.last - run.first]

    def _refine(
        self,
        logits: Tensor,
        queries: Tensor,
        pages: Tensor,
        layer: int,
        runs: list[Run],
        wanted: int,
    ) -> None:
        """Score the tokens of the best blocks by their own keys, `wanted` tokens of each kv head.

        Args:
            logits: (Hkv, G, T), of tokens by their blocks; written in place.
            queries: (Hkv, G, D).
            pages: of the sequence.
            layer: that they are of.
            runs: that cover the tokens in the pages.
            wanted: fewer than those; the last of the blocks may be scored in part.
        """
        newest_first = _scores(logits)[:, : runs[-1].last].flip(-1)
        order = newest_first.sort(dim=-1, descending=True, stable=True).indices
        best = (runs[-1].last - 1 - order[:, :wanted]).sort(dim=-1).values  # (Hkv, wanted)
        for head, of_head in enumerate(best):
            for run in (run for run in runs if run.strategy.block > 1):
                position = of_head[(of_head >= run.first) & (of_head < run.last)]
                keys = self._pages.keys(pages, layer, torch.tensor(head), position, run.strategy)
                rotation, group = run.strategy.rotations[0, head], run.strategy.group
                logits[head, :, position] = score_packed(
                    queries[head], keys, rotation, group, self._model.scale
                )

    def _to_pool_dtype(self, tokens: Tensor) -> Tensor:
        """Rounded; what decodes beyond the dtype's range is its largest number."""
        dtype = self._model.torch_dtype
        largest = torch.finfo(dtype).max
        return tokens.clamp(-largest, largest).to(dtype)


def _segment_lengths(config: CacheRankConfig) -> SegmentLengths:
    options = config.kv_residency_options
    return SegmentLengths(int(options.get("segment", 8192)), float(options.get("threshold", 1024)))


def _scores(logits: Tensor) -> Tensor:
    """The largest log-probability over the heads of a group: (Hkv, G, T) to (Hkv, T)."""
    return torch.log_softmax(logits, dim=-1).amax(dim=-2)
