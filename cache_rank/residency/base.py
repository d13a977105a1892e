"""What a residency format is: how the cache rank holds K and V.

A format says how tokens are taken over (`_load`, `_append`), how they are scored (`_score`), how
they are decoded into a message (`gather`), and how many bytes a token takes (`bytes_per_token`).
All the rest has a default. With `--score-keys sketch`, sketches of the keys lie beside the tokens
of any format and are scored in their place.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig, OptionValue
from cache_rank.kernels.rows import Shipment
from cache_rank.kernels.score import score_workspace
from cache_rank.pages import PAGE_TOKENS
from cache_rank.residency.options import Ranges
from cache_rank.residency.scores import ScoreBuffers
from cache_rank.residency.sketched import KeySketches


class Residency(ABC):
    """K and V of all sequences, in pages of PAGE_TOKENS tokens.

    Attributes:
        scores: the memory that scores are written to.
    """

    name: ClassVar[str]
    """The format is called so by `--kv-residency`."""

    options: ClassVar[Ranges] = {}
    """These options may be given to the format; their defaults are stated here alone."""

    lossless: ClassVar[bool] = False
    """Tokens are read back as they came."""

    verifies: ClassVar[bool] = False
    """Its attention is exact enough to verify drafts: to every channel, by queries as they came."""

    captures_append: ClassVar[bool] = True
    """Appends of as many rows always queue the same work, so that CUDA graphs can capture them."""

    @classmethod
    def tail_tokens(cls) -> int | None:
        """So many tokens of complete pages are held outside of them, too, while they are newest.

        None where a page depends on more than its own tokens, so that no two sequences can have it.
        """
        return 0

    @classmethod
    def validate(cls, options: Mapping[str, OptionValue]) -> None:
        """Check options of this format.

        Raises:
            ValueError: one is unknown or out of range; the message names those that there are,
                with their ranges.
        """
        described = ", ".join(f"{name} {values}" for name, values in cls.options.items())
        for name, value in options.items():
            if name not in cls.options or not cls.options[name].accepts(value):
                raise ValueError(
                    f"kv_residency_options {name}={value}: {cls.name} takes "
                    f"{described or 'no options'}"
                )

    @classmethod
    def settings(cls, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """All options, with the defaults of those that are not given."""
        return {name: options.get(name, values.default) for name, values in cls.options.items()}

    @classmethod
    @abstractmethod
    def bytes_per_token(cls, config: CacheRankConfig) -> int:
        """Memory of one token in the pages: all layers, metadata included."""

    @classmethod
    def fixed_bytes(cls, config: CacheRankConfig) -> int:
        """Memory beside the pages, however few tokens are held."""
        return 0

    @abstractmethod
    def _load(self, shipment: Shipment) -> None:
        """See `load`."""

    @abstractmethod
    def _append(self, rows: BatchMetadata, layers: range, up: Tensor, query_ring: Tensor) -> None:
        """See `append`."""

    @abstractmethod
    def _score(
        self, rows: BatchMetadata, layers: range, queries: Tensor, workspace: Any, out: Tensor
    ) -> None:
        """See `score`; `workspace` is what `score_workspace` made."""

    def __init__(self, config: CacheRankConfig, pages: int, device: torch.device) -> None:
        self._model = config.model
        self._device = device
        sketched = config.score_keys == "sketch"
        self._sketches = KeySketches(config, pages, device) if sketched else None
        make_workspace = (self._sketches or self).score_workspace
        self.scores = ScoreBuffers(config.model.kv_heads, make_workspace, device)

    def load_basis(self, layer: int, basis: Tensor) -> None:
        """Take over the directions of a layer's keys, (Hkv, D + 1, D); see protocol.KeyBasis.

        What scores by no sketch has no use for them.
        """
        if self._sketches is not None:
            self._sketches.load_basis(layer, basis)

    def load(self, shipment: Shipment) -> None:
        """Take over tokens of some sequences."""
        self._load(shipment)
        if self._sketches is not None:
            self._sketches.load(shipment)

    def append(self, rows: BatchMetadata, layers: range, up: Tensor, query_ring: Tensor) -> None:
        """Take over one token a row, and its queries, from `up`; see UpMessage.tokens.

        Queries are written to the ring, (slots, layers, Hq, W + 1, D).
        """
        self._append(rows, layers, up, query_ring)
        if self._sketches is not None:
            self._sketches.append(rows, layers, up)

    def score(
        self, rows: BatchMetadata, layers: range, queries: Tensor, chosen: Tensor | None = None
    ) -> Tensor:
        """Score all resident tokens: (R, len(layers), Hkv, >= capacity) float32.

        The result is valid until the next call. Queries are (R, len(layers), Hq, D) float32;
        `chosen` are the tokens in the slots of all sequences, for what normalizes by these, see
        `score_normalizer`.
        """
        workspace, out = self.scores.take(queries.shape[0], len(layers), rows.capacity)
        if self._sketches is None:
            self._score(rows, layers, queries, workspace, out)
        else:
            self._sketches.score(rows, layers, queries, chosen, workspace, out)
        return out

    @abstractmethod
    def gather(
        self, rows: BatchMetadata, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Decode tokens into a message.

        They are at positions `entering`, (R, len(layers), Hkv, C) int32; -1 leaves its entry alone.
        Keys and values, (..., C, width), are in the pool's dtype or another of a message, see
        `to_wire`.
        """

    def attend(
        self, rows: BatchMetadata, layer: int, queries: Tensor, out: Tensor, log_sums: Tensor
    ) -> None:
        """Attend to all tokens of each row up to its position, as exactly as they are held.

        Args:
            queries: (R, Q, Hq, D), of later tokens, in the pool's dtype.
            out, log_sums: (R, Q, Hq, D), any float dtype, and log-sum-exps, (R, Q, Hq) float32;
                both are contiguous, and written in place.

        Raises:
            NotImplementedError: the format does not attend.
        """
        raise NotImplementedError(f"{self.name} does not attend")

    def load_tail(self, shipment: Shipment) -> None:
        """Take over tokens whose pages came complete before them, so that they can be newest.

        The first of a row is at most `tail_tokens` before the end of its page.
        """
        return

    def load_pages(self, pages: Tensor, packed: Tensor) -> None:
        """Take over complete pages, (n,) int64, as a `PageEncoder` of this format has packed them.

        Raises:
            NotImplementedError: the format does not take them, see `residency.takes_codes`.
        """
        raise NotImplementedError(f"{self.name} takes no codes")

    def page_planes(self) -> tuple[Tensor, ...]:
        """What the tokens of a page are read from, by page, (pages, ...) each.

        A format whose pages cannot be shared need not say.
        """
        return ()

    @classmethod
    def refining_planes(cls) -> tuple[int, ...]:
        """Which of `page_planes` may come later; with zeros in them a page is read less exactly."""
        return ()

    def page_memory(self) -> tuple[Tensor, ...]:
        """All that belongs to a page, by page, (pages, ...) each."""
        sketches = () if self._sketches is None else (self._sketches.codes,)
        return *self.page_planes(), *sketches

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page: a format with `tail_tokens` writes the last one of another again."""
        for part in self.page_memory():
            part[target].copy_(part[source])

    @property
    def packed_bytes(self) -> int:
        """Size of a page that is packed."""
        return sum(plane[0].nbytes for plane in self.page_planes())

    def pack_page(self, page: int) -> Tensor:
        """Copy what the tokens of a page are read from, (packed_bytes,) uint8."""
        return torch.cat([plane[page].view(-1).view(torch.uint8) for plane in self.page_planes()])

    def planes_of_packed(self, packed: Tensor) -> tuple[Tensor, ...]:
        """The parts of what `pack_page` of this format has copied, (bytes,) uint8 by plane."""
        return packed.split([plane[0].nbytes for plane in self.page_planes()])

    def unpack_page(self, packed: Tensor, page: int) -> None:
        """Write to a page what `pack_page` of this format has copied."""
        pieces = self.planes_of_packed(packed)
        for plane, piece in zip(self.page_planes(), pieces, strict=True):
            plane[page].view(-1).view(torch.uint8).copy_(piece)

    def read_first_page(self) -> tuple[Tensor, Tensor]:
        """Decode the first of all pages, whose tokens are complete.

        Keys and values, (layers, Hkv, PAGE_TOKENS, D) each, are in the pool's dtype.
        """
        return self.read(self._first_page, range(self._model.layers), self._tokens_of_a_page)

    @functools.cached_property
    def _first_page(self) -> BatchMetadata:
        # Of a sequence with so many tokens more, no token of the page is in a ring.
        newest = PAGE_TOKENS + (self.tail_tokens() or 0) - 1
        pages = torch.zeros(1, dtype=torch.int32)
        return BatchMetadata.of_one(pages, 0, newest, self._device)

    @functools.cached_property
    def _tokens_of_a_page(self) -> Tensor:
        tokens = torch.arange(PAGE_TOKENS, dtype=torch.int32, device=self._device)
        return tokens.expand(self._model.layers, self._model.kv_heads, -1).contiguous()

    def end(self, slot: int) -> None:
        """Forget a sequence that has ended; its slot may begin another.

        A format whose sequences own nothing but pages has nothing to do.
        """
        return

    def check(self) -> None:
        """Report tokens that cannot be held; on a GPU, some steps later.

        A format that can hold whatever comes has nothing to report.

        Raises:
            ValueError: some cannot be held.
        """
        return

    def score_workspace(self, rows: int, layers: int, capacity: int) -> Any:
        """Allocate the scratch memory of a scoring of at most so many rows, layers and tokens."""
        model = self._model
        heads = (model.kv_heads, model.query_heads // model.kv_heads)
        return score_workspace(rows, layers, *heads, capacity, self._device)

    def read(self, rows: BatchMetadata, layers: range, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Decode tokens of one sequence, which is alone in a step.

        They are at positions (len(layers), Hkv, n); what -1 reads is arbitrary. Keys and values,
        (len(layers), Hkv, n, D) each, are in the pool's dtype.
        """
        entering = positions.to(torch.int32).unsqueeze(0).contiguous()
        shape = (*entering.shape, self._model.head_dim)
        keys, values = torch.empty(
            (2, *shape), dtype=self._model.torch_dtype, device=entering.device
        )
        self.gather(rows, layers, entering, keys, values)
        return keys[0], values[0]
