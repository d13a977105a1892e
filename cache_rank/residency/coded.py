"""What formats that hold codes share: complete groups as codes in pages, newer tokens as they came.

kernels/coded/reference.py says which tokens are held as codes, and why steps that overlap agree.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.append import append_step, load_tokens
from cache_rank.kernels.coded import attend_codes, encode_groups, gather_codes, score_codes
from cache_rank.kernels.coded.reference import Codec, CodedTokens
from cache_rank.kernels.newest import attend_to_ring
from cache_rank.kernels.rows import Shipment
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import Layout, Part
from cache_rank.residency.base import Residency
from cache_rank.residency.not_finite import NotFinite

_NOT_FINITE = Part(torch.int32, (1,))


class CodedResidency(Residency):
    """Codes in pages, and a full-precision ring of the newest tokens of each slot.

    A subclass sets the class attributes, and builds the codecs.
    """

    group_tokens: ClassVar[int]
    """So many tokens are encoded together; the number divides PAGE_TOKENS."""

    full_groups: ClassVar[int] = 0
    """So many of the newest complete groups stay in full precision."""

    @classmethod
    @abstractmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        """Build the codecs of keys and of values."""

    @classmethod
    def ring_tokens(cls) -> int:
        """Tokens of a slot's ring: the full groups, and the one that is not complete."""
        return cls.group_tokens * (cls.full_groups + 1)

    @classmethod
    def tail_tokens(cls) -> int:
        return cls.group_tokens * cls.full_groups

    @classmethod
    def bytes_per_token(cls, config: CacheRankConfig) -> int:
        model = config.model
        planes = [plane for codec in cls.codecs(config) for plane in codec.planes(model.head_dim)]
        group = sum(plane.entries * plane.width * plane.dtype.itemsize for plane in planes)
        return -(-group * model.layers * model.kv_heads // cls.group_tokens)

    @classmethod
    def fixed_bytes(cls, config: CacheRankConfig) -> int:
        return config.max_rows * cls.ring_tokens() * config.model.bytes_per_token

    def __init__(self, config: CacheRankConfig, pages: int, device: torch.device) -> None:
        super().__init__(config, pages, device)
        model = config.model
        # Of what is encoded here, and of pages that come beside steps, from another's encoder.
        self._not_finite = NotFinite(model, device, flags=2)
        self._layout = functools.cache(functools.partial(CodedPages, type(self), config))
        planes = [
            tuple(torch.empty(part.shape, dtype=part.dtype, device=device) for part in parts)
            for parts in self.plane_parts(config, pages)
        ]
        ring = (config.max_rows, model.layers, model.kv_heads, self.ring_tokens(), model.head_dim)
        self._tokens = CodedTokens(
            codecs=self.codecs(config),
            planes=(planes[0], planes[1]),
            rings=(
                torch.empty(ring, dtype=model.torch_dtype, device=device),
                torch.empty(ring, dtype=model.torch_dtype, device=device),
            ),
            not_finite=self._not_finite.flags[:1],
            group_tokens=self.group_tokens,
            page_tokens=PAGE_TOKENS,
        )

    @classmethod
    def plane_parts(cls, config: CacheRankConfig, pages: int) -> tuple[list[Part], list[Part]]:
        """The planes of keys and of values: (pages, layers, Hkv, entries of a page, width) each."""
        model, groups = config.model, PAGE_TOKENS // cls.group_tokens
        unit = (pages, model.layers, model.kv_heads)
        keys, values = (
            [
                Part(plane.dtype, (*unit, groups * plane.entries, plane.width))
                for plane in codec.planes(model.head_dim)
            ]
            for codec in cls.codecs(config)
        )
        return keys, values

    def _load(self, shipment: Shipment) -> None:
        # Encode before the rings take the new tokens: a group that they complete began with older
        # ones, which are in them.
        encode_groups(self._tokens, shipment.rows, range(self._model.layers), shipment)
        self.load_tail(shipment)
        self.check()

    def load_tail(self, shipment: Shipment) -> None:
        load_tokens(shipment.in_rings(), *self._tokens.rings)

    def load_pages(self, pages: Tensor, packed: Tensor) -> None:
        not_finite, came = self._layout(len(pages)).of(packed)
        noted = self._not_finite.flags[1:]
        torch.maximum(noted, not_finite, out=noted)
        for plane, pages_of_plane in zip(self.page_planes(), sum(came, ()), strict=True):
            _in_words(plane).index_copy_(0, pages, _in_words(pages_of_plane))
        self.check()

    def page_planes(self) -> tuple[Tensor, ...]:
        keys, values = self._tokens.planes
        return *keys, *values

    def _append(self, rows: BatchMetadata, layers: range, up: Tensor, query_ring: Tensor) -> None:
        append_step(
            up,
            *self._tokens.rings,
            query_ring,
            rows.paged._replace(page_table=rows.slots.unsqueeze(1)),
            layers.start,
        )
        encode_groups(self._tokens, rows.paged, layers)
        if self._device.type != "cuda":
            self.check()

    def _score(
        self, rows: BatchMetadata, layers: range, queries: Tensor, workspace: Any, out: Tensor
    ) -> None:
        score_codes(
            self._tokens,
            queries,
            rows.paged,
            layers.start,
            self._model.scale,
            workspace,
            out,
        )

    def gather(
        self, rows: BatchMetadata, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        gather_codes(
            self._tokens,
            rows.paged,
            layers.start,
            entering,
            keys,
            values,
        )

    def _attend_by(
        self,
        codecs: tuple[Codec, Codec],
        rows: BatchMetadata,
        layer: int,
        queries: Tensor,
        out: Tensor,
        log_sums: Tensor,
    ) -> None:
        """See `attend`. Codes are attended to where they lie, as these codecs read them."""
        tokens, scale = self._tokens._replace(codecs=codecs), self._model.scale
        older = attend_codes(tokens, queries, rows.paged, layer, scale)
        keys, values = (ring[:, layer].transpose(1, 2) for ring in tokens.rings)
        place = rows.slots, rows.positions, self.group_tokens
        attend_to_ring(queries, keys, values, *place, scale, older, out, log_sums)

    def check(self) -> None:
        self._not_finite.check()


def _in_words(plane: Tensor) -> Tensor:
    """A plane by pages, (pages, words) int64."""
    return plane.view(len(plane), -1).view(torch.int64)


class CodedPages(Layout):
    """Complete pages of one sequence in a message, as codes.

    It is kept for each number of pages: the host would take longer for it than for the launches.
    """

    def __init__(self, held: type[CodedResidency], config: CacheRankConfig, pages: int) -> None:
        keys, values = held.plane_parts(config, pages)
        super().__init__([_NOT_FINITE, *keys, *values])
        self._planes_of_keys = len(keys)

    def of(self, memory: Tensor) -> tuple[Tensor, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Views into a message: `not_finite` and `planes` of its `CodedTokens`."""
        not_finite, *planes = self.views(memory)
        of_keys = self._planes_of_keys
        return not_finite, (tuple(planes[:of_keys]), tuple(planes[of_keys:]))
