"""What formats that hold codes share: complete groups as codes in pages, newer tokens as they came.

A sequence's newest tokens wait in a ring of its slot until a group of them is complete and old
enough; then the group is encoded, once and for all. So codes do not depend on how tokens arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.pages import PAGE_TOKENS

if TYPE_CHECKING:
    from cache_rank.residency import StepRows

_TILE_TOKENS = 4096
"""Tokens of one sequence that are decoded at once for scoring."""


class Plane(NamedTuple):
    """One tensor of a group's codes, (entries, width), or of numbers they are relative to.

    Attributes:
        entries: each is of as many successive tokens of the group; divides its size.
        width: elements of an entry.
        dtype: of an element.
    """

    entries: int
    width: int
    dtype: torch.dtype


class Codec(Protocol):
    """Encodes keys, or values."""

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """The tensors of its codes, in the order of `encode` and `decode`."""

    def encode(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Encode groups, (..., group tokens, D), to planes, (..., entries, width).

        Elements that cannot be encoded leave something in a plane that is not finite.
        """

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        """Decode tokens: (n, D) float32.

        Args:
            entries: (n, width) of each plane, those of n tokens.
        """

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float, exact: bool) -> Tensor:
        """Logits of groups of keys: (..., G, group tokens) float32.

        Args:
            queries: (..., G, D) float32.
            planes: of the groups, (..., entries, width) each.
            scale: factor on the logits.
            exact: read all that there is, whatever reading is configured.
        """


class CodedResidency:
    """Codes in pages, and a full-precision ring of the newest tokens of each slot.

    A subclass sets the class attributes and builds the codecs.
    """

    lossless: ClassVar[bool] = False
    runs_on_gpu: ClassVar[bool] = False

    group_tokens: ClassVar[int]
    """Tokens that are encoded together; divides PAGE_TOKENS."""

    full_groups: ClassVar[int]
    """Newest complete groups that stay in full precision."""

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        """Of keys and of values."""
        raise NotImplementedError

    @classmethod
    def ring_tokens(cls) -> int:
        """Tokens of a slot's ring; position p is in entry p % ring_tokens."""
        return cls.group_tokens * (cls.full_groups + 1)

    @classmethod
    def coded_tokens(cls, resident: int) -> int:
        """How many of a sequence's tokens are held as codes; the rest is in the ring."""
        return max(0, resident // cls.group_tokens - cls.full_groups) * cls.group_tokens

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
        model = config.model
        self.page_bytes = PAGE_TOKENS * self.bytes_per_token(config)
        self._model = model
        self._device = device
        self._codecs = self.codecs(config)
        self._planes = [
            [
                torch.empty(
                    (
                        pages,
                        model.layers,
                        model.kv_heads,
                        PAGE_TOKENS // self.group_tokens * plane.entries,
                        plane.width,
                    ),
                    dtype=plane.dtype,
                    device=device,
                )
                for plane in codec.planes(model.head_dim)
            ]
            for codec in self._codecs
        ]
        ring = (config.max_rows, model.layers, model.kv_heads, self.ring_tokens(), model.head_dim)
        self._rings = [torch.empty(ring, dtype=model.torch_dtype, device=device) for _ in range(2)]
        self._coded = torch.zeros((config.max_rows, model.layers), dtype=torch.int32, device=device)
        self._scores = [torch.empty(0, device=device)] * 2

    def load(self, pages: Tensor, slot: int, start: int, shipment: Tensor) -> None:
        every_layer = range(self._model.layers)
        stop = start + shipment.shape[2]
        first = start
        while first < stop:
            # No further than the next group's end: the ring has no room for more.
            last = min(stop, (first // self.group_tokens + 1) * self.group_tokens)
            entries = torch.arange(first, last, device=self._device) % self.ring_tokens()
            for ring, tokens in zip(self._rings, shipment, strict=True):
                part = tokens[:, first - start : last - start]  # (layers, n, Hkv, D)
                ring[slot, :, :, entries] = part.transpose(1, 2).to(ring.dtype)
            self._encode_complete(pages, slot, every_layer, last)
            first = last

    def append(self, rows: StepRows, layers: range, up: Tensor, query_ring: Tensor) -> None:
        row = (rows.slots >= 0).nonzero().squeeze(-1)
        position, slot = rows.positions[row].to(torch.int64), rows.slots[row].to(torch.int64)
        layer = torch.arange(layers.start, layers.stop, device=self._device)
        heads = (self._model.query_heads, self._model.kv_heads, self._model.kv_heads)
        destinations = (query_ring, *self._rings)
        for ring, part in zip(destinations, up[row].split(heads, dim=2), strict=True):
            entry = (position % ring.shape[3]).unsqueeze(-1)
            ring[slot.unsqueeze(-1), layer, :, entry] = part.to(ring.dtype)
        for index, state, resident in zip(
            row.tolist(), slot.tolist(), (position + 1).tolist(), strict=True
        ):
            self._encode_complete(rows.page_table[index], state, layers, resident)

    def score(
        self, rows: StepRows, layers: range, queries: Tensor, turn: int, exact: bool = False
    ) -> Tensor:
        model = self._model
        shape = (queries.shape[0], len(layers), model.kv_heads, rows.capacity)
        out = self._scores_buffer(shape, turn)
        grouped = queries.unflatten(2, (model.kv_heads, -1))  # (R, L, Hkv, G, D)
        for row, (slot, position) in enumerate(
            zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        ):
            if slot < 0:
                continue
            parts = self._logits(
                grouped[row], rows.page_table[row], slot, layers, position + 1, exact
            )
            log_probabilities = torch.log_softmax(torch.cat(list(parts), dim=-1), dim=-1)
            out[row, :, :, : position + 1] = log_probabilities.amax(dim=-2)
        return out

    def gather(
        self, rows: StepRows, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        used = (entering >= 0) & (rows.slots >= 0).view(-1, 1, 1, 1)
        row, layer, head, entry = used.nonzero(as_tuple=True)
        position = entering[row, layer, head, entry].to(torch.int64)
        tokens = self._tokens(
            rows.page_table[row, position // PAGE_TOKENS].to(torch.int64),
            rows.slots[row].to(torch.int64),
            layer + layers.start,
            head,
            position,
        )
        for out, part in zip((keys, values), tokens, strict=True):
            out[row, layer, head, entry] = part

    def read(
        self, pages: Tensor, slot: int, layers: range, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer = torch.arange(layers.start, layers.stop, device=self._device).view(-1, 1, 1)
        head = torch.arange(self._model.kv_heads, device=self._device).view(1, -1, 1)
        keys, values = self._tokens(
            pages[positions // PAGE_TOKENS].to(torch.int64).flatten(),
            torch.full((positions.numel(),), slot, device=self._device),
            layer.expand(positions.shape).flatten(),
            head.expand(positions.shape).flatten(),
            positions.flatten(),
        )
        shape = (*positions.shape, self._model.head_dim)
        return keys.view(shape), values.view(shape)

    def _tokens(
        self, page: Tensor, slot: Tensor, layer: Tensor, head: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens, each of a place of its own, (n,) int64: keys and values (n, D) in pool dtype."""
        coded = (position < self._coded[slot, layer]).nonzero().squeeze(-1)
        place = (page[coded], layer[coded], head[coded])
        offset = position[coded] % PAGE_TOKENS
        found = []
        for ring, codec, planes in zip(self._rings, self._codecs, self._planes, strict=True):
            tokens = ring[slot, layer, head, position % self.ring_tokens()]
            entries = [plane[(*place, offset * plane.shape[3] // PAGE_TOKENS)] for plane in planes]
            tokens[coded] = self._to_pool_dtype(codec.decode(entries))
            found.append(tokens)
        return found[0], found[1]

    def _encode_complete(self, pages: Tensor, slot: int, layers: range, resident: int) -> None:
        """Account for `resident` tokens, and encode the group that the last of them completes."""
        size = self.group_tokens
        coded = self.coded_tokens(resident)
        self._coded[slot, layers.start : layers.stop] = coded
        if resident % size or not coded:
            return
        first = coded - size
        page, entry = int(pages[first // PAGE_TOKENS]), first % PAGE_TOKENS // size
        entries = slice(first % self.ring_tokens(), first % self.ring_tokens() + size)
        names = ("keys", "values")
        for name, ring, codec, planes in zip(
            names, self._rings, self._codecs, self._planes, strict=True
        ):
            tokens = ring[slot, layers.start : layers.stop, :, entries]  # (L, Hkv, size, D)
            codes = codec.encode(tokens)
            self._refuse_not_finite(name, codes, layers)
            for plane, code in zip(planes, codes, strict=True):
                span = code.shape[2]
                plane[page, layers.start : layers.stop, :, entry * span : (entry + 1) * span] = code

    def _refuse_not_finite(self, name: str, codes: Sequence[Tensor], layers: range) -> None:
        for code in codes:
            if code.is_floating_point() and not code.isfinite().all():
                layer, head = (~code.isfinite()).flatten(2).any(dim=-1).nonzero()[0].tolist()
                raise ValueError(
                    f"{name} of layer {layers.start + layer}, kv head {head} are not finite, or "
                    "span more than float32"
                )

    def _logits(
        self,
        queries: Tensor,
        page_table: Tensor,
        slot: int,
        layers: range,
        resident: int,
        exact: bool,
    ) -> Iterator[Tensor]:
        """Logits of a sequence's tokens, (L, Hkv, G, n) at a time; queries (L, Hkv, G, D)."""
        scale, size = self._model.scale, self.group_tokens
        (coded,) = set(self._coded[slot, layers.start : layers.stop].tolist())
        coded = min(coded, resident)
        layer = torch.arange(layers.start, layers.stop, device=self._device)
        for first in range(0, coded, _TILE_TOKENS):
            last = min(first + _TILE_TOKENS, coded)
            group = torch.arange(first // size, -(-last // size), device=self._device)
            page = page_table[group * size // PAGE_TOKENS].to(torch.int64).unsqueeze(-1)
            within = (group % (PAGE_TOKENS // size)).unsqueeze(-1)
            planes = [
                plane.unflatten(3, (PAGE_TOKENS // size, -1))[page, layer, :, within]
                for plane in self._planes[0]
            ]  # (groups, L, Hkv, entries, width)
            logits = self._codecs[0].score(queries, planes, scale, exact)
            yield logits.permute(1, 2, 3, 0, 4).flatten(3)[..., : last - first]
        if coded < resident:
            entries = torch.arange(coded, resident, device=self._device) % self.ring_tokens()
            keys = self._rings[0][slot, layers.start : layers.stop, :, entries].float()
            yield (queries @ keys.transpose(-1, -2)) * scale

    def _scores_buffer(self, shape: tuple[int, ...], turn: int) -> Tensor:
        size = math.prod(shape)
        if self._scores[turn].numel() < size:
            self._scores[turn] = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._scores[turn][:size].view(shape)

    def _to_pool_dtype(self, tokens: Tensor) -> Tensor:
        """Rounded; what decodes beyond the dtype's range is its largest number."""
        dtype = self._model.torch_dtype
        largest = torch.finfo(dtype).max
        return tokens.clamp(-largest, largest).to(dtype)
