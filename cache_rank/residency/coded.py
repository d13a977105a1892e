"""What formats that hold codes share: complete groups as codes in pages, newer tokens as they came.

kernels/coded/reference.py says which tokens are held as codes, and why steps that overlap agree.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from cache_rank_kernels.coded.reference import Codec, CodedTokens, read_tokens
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.copies import upload
from cache_rank.operations import coded_operations_for, operations_for
from cache_rank.pages import PAGE_TOKENS, ROLLBACK_TOKENS
from cache_rank.residency.not_finite import NotFinite
from cache_rank.residency.scores import ScoreBuffers
from cache_rank.step_rows import StepRows


class CodedResidency:
    """Codes in pages, and a full-precision ring of the newest tokens of each slot.

    A subclass sets the class attributes and builds the codecs.
    """

    lossless: ClassVar[bool] = False
    captures_append: ClassVar[bool] = True

    kernels: ClassVar[str] = ""
    """Folder of the format's Triton kernels, when it runs on GPUs."""

    group_tokens: ClassVar[int]
    """Tokens that are encoded together; divides PAGE_TOKENS, and more than ROLLBACK_TOKENS."""

    full_groups: ClassVar[int]
    """Newest complete groups that stay in full precision."""

    @classmethod
    def codecs(cls, config: CacheRankConfig) -> tuple[Codec, Codec]:
        """Of keys and of values."""
        raise NotImplementedError

    @classmethod
    def ring_tokens(cls) -> int:
        """Tokens of a slot's ring."""
        return cls.group_tokens * (cls.full_groups + 1) + ROLLBACK_TOKENS

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
        self._operations = operations_for(device)
        self._coded_operations = coded_operations_for(device, self.kernels)
        self._scores = ScoreBuffers(model, self._operations.score_workspace, device)
        self._not_finite = NotFinite(model, device)
        codecs = self.codecs(config)
        ring = (config.max_rows, model.layers, model.kv_heads, self.ring_tokens(), model.head_dim)
        self._tokens = CodedTokens(
            codecs=codecs,
            planes=(self._planes(codecs[0], pages), self._planes(codecs[1], pages)),
            rings=(
                torch.empty(ring, dtype=model.torch_dtype, device=device),
                torch.empty(ring, dtype=model.torch_dtype, device=device),
            ),
            resident=torch.zeros((config.max_rows, model.layers), dtype=torch.int32, device=device),
            not_finite=self._not_finite.flags,
            group_tokens=self.group_tokens,
            page_tokens=PAGE_TOKENS,
        )

    def _planes(self, codec: Codec, pages: int) -> tuple[Tensor, ...]:
        model, groups = self._model, PAGE_TOKENS // self.group_tokens
        return tuple(
            torch.empty(
                (pages, model.layers, model.kv_heads, groups * plane.entries, plane.width),
                dtype=plane.dtype,
                device=self._device,
            )
            for plane in codec.planes(model.head_dim)
        )

    def load(self, pages: Tensor, slot: int, start: int, shipment: Tensor) -> None:
        place = (torch.tensor([slot], dtype=torch.int32), torch.tensor([start], dtype=torch.int32))
        slots, starts = upload(place, self._device)
        # Before the ring takes the new tokens: what they complete began with older ones in it.
        self._coded_operations.encode_groups(
            self._tokens,
            pages.unsqueeze(0),
            slots,
            starts,
            shipment.shape[2],
            range(self._model.layers),
            shipment,
        )
        self._operations.load_tokens(shipment, *self._tokens.rings, slots, start)
        self.check()

    def append(self, rows: StepRows, layers: range, up: Tensor, query_ring: Tensor) -> None:
        self._operations.append_step(
            up,
            *self._tokens.rings,
            query_ring,
            rows.slots.unsqueeze(1),
            rows.slots,
            rows.positions,
            layers.start,
        )
        self._coded_operations.encode_groups(
            self._tokens, rows.page_table, rows.slots, rows.positions, 1, layers
        )
        if self._device.type != "cuda":
            self.check()

    def truncate(self, pages: Tensor, slot: int, tokens: int) -> None:
        self._tokens.resident[slot].fill_(tokens)

    def end(self, slot: int) -> None:
        """What is there of a sequence that has ended is not read."""

    def prepare(self, rows: int, layers: int, capacity: int) -> int:
        return self._scores.prepare(rows, layers, capacity)

    def score(self, rows: StepRows, layers: range, queries: Tensor, exact: bool = False) -> Tensor:
        workspace, out = self._scores.take(queries.shape[0], len(layers), rows.capacity)
        self._coded_operations.score_codes(
            self._tokens,
            queries,
            rows.page_table,
            rows.slots,
            rows.positions,
            layers.start,
            self._model.scale,
            workspace,
            out,
            exact,
        )
        return out

    def gather(
        self, rows: StepRows, layers: range, entering: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        self._coded_operations.gather_codes(
            self._tokens,
            rows.page_table,
            rows.slots,
            rows.positions,
            layers.start,
            entering,
            keys,
            values,
        )

    def read(
        self, pages: Tensor, slot: int, layers: range, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer = torch.arange(layers.start, layers.stop, device=self._device).view(-1, 1, 1)
        head = torch.arange(self._model.kv_heads, device=self._device).view(1, -1, 1)
        layer, head = (index.expand(positions.shape).flatten() for index in (layer, head))
        keys, values = read_tokens(
            self._tokens,
            pages[positions // PAGE_TOKENS].to(torch.int64).flatten(),
            torch.full_like(layer, slot),
            layer,
            head,
            positions.flatten(),
            self._tokens.resident[slot, layer],
        )
        shape = (*positions.shape, self._model.head_dim)
        return keys.view(shape), values.view(shape)

    def check(self) -> None:
        self._not_finite.check()
