"""A sequence that a residency holds, on pages in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from small_models import GQA, small_config
from torch import Tensor

from cache_rank import residency
from cache_rank.batch_metadata import BatchMetadata
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.kernels.rows import PagedRows, Shipment, ShippedRow
from cache_rank.protocol import AnswerHeader
from cache_rank.residency.base import Residency

CPU = torch.device("cpu")
PAGES = 16


@dataclass
class Held:
    """K and V are (2, layers, Hkv, tokens, D), of which the first tokens are resident."""

    config: CacheRankConfig
    residency: Any
    query_ring: Tensor
    tokens: Tensor
    slot: int
    pages: list[int]
    resident: int = 0

    @classmethod
    def empty(
        cls,
        name: str,
        tokens: int | Tensor,
        model: ModelShape = GQA,
        slot: int = 1,
        beside: Held | None = None,
        tokens_seed: int = 0,
        device: torch.device = CPU,
        **options: Any,
    ) -> Held:
        """Nothing yet of a sequence, of so many random tokens or of some, in a residency or beside
        another."""
        config = small_config(model, kv_residency=name, kv_residency_options=options)
        if isinstance(tokens, int):
            generator = torch.Generator().manual_seed(tokens_seed)
            shape = (2, model.layers, model.kv_heads, tokens, model.head_dim)
            tokens = torch.randn(shape, generator=generator)
        tokens = tokens.to(device, model.torch_dtype, copy=True)
        if beside is not None:
            held, ring = beside.residency, beside.query_ring
        else:
            held = residency.create(config, PAGES, device)
            shape = (4, model.layers, model.query_heads, 5, model.head_dim)
            ring = torch.zeros(shape, dtype=model.torch_dtype, device=device)
        pages = list(range(PAGES))
        random.Random(tokens_seed).shuffle(pages)
        return cls(config, held, ring, tokens, slot, pages)

    @classmethod
    def whole(cls, *arguments: Any, **options: Any) -> Held:
        """All tokens, in one shipment."""
        held = cls.empty(*arguments, **options)
        held.load(held.tokens.shape[3])
        return held

    @classmethod
    def two(cls, name: str, left: int, right: int, **arguments: Any) -> tuple[Held, Held]:
        """Nothing yet of two sequences of one residency, whose pages lie between each other's."""
        one = cls.empty(name, left, slot=2, **arguments)
        other = cls.empty(name, right, slot=0, tokens_seed=1, beside=one, **arguments)
        one.pages, other.pages = one.pages[::2], one.pages[1::2]
        return one, other

    @property
    def keys(self) -> Tensor:
        return self.tokens[0]

    @property
    def values(self) -> Tensor:
        return self.tokens[1]

    @property
    def page_table(self) -> Tensor:
        return torch.tensor(self.pages, dtype=torch.int32, device=self.tokens.device)

    @property
    def layers(self) -> range:
        return range(self.config.model.layers)

    def queries(self) -> Tensor:
        model = self.config.model
        return torch.randn(model.layers, model.query_heads, model.head_dim)

    def load(self, count: int) -> None:
        load_together([(self, count)])

    def append(self, layers_per_group: int = 2) -> None:
        append_together([self], layers_per_group)

    def message(self, layers: range) -> Tensor:
        """The next token: (1, len(layers), Hq + 2 Hkv, D). Its queries are its position."""
        group = slice(layers.start, layers.stop)
        keys, values = self.tokens[:, group, :, self.resident]
        queries = torch.full_like(self.query_ring[0, group, :, 0], float(self.resident))
        return torch.cat((queries, keys, values), dim=1).unsqueeze(0)

    def read(
        self, layers: range | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of some layers, or all; tokens at (..., n) positions, or all."""
        layers = layers or self.layers
        if positions is None:
            positions = torch.arange(self.resident)
        shape = (len(layers), self.config.model.kv_heads, positions.shape[-1])
        rows = rows_of([self], [self.resident - 1])
        return self.residency.read(rows, layers, positions.to(self.tokens.device).expand(shape))

    def score(
        self,
        queries: Tensor,
        layers: range | None = None,
        position: int | None = None,
    ) -> Tensor:
        """Scores of the tokens up to a position, or of all."""
        layers = layers or self.layers
        position = self.resident - 1 if position is None else position
        one_row = queries.unsqueeze(0).to(self.tokens.device)
        scores = self.residency.score(rows_of([self], [position]), layers, one_row)
        assert scores.dtype == torch.float32
        assert scores.shape[:3] == (1, len(layers), self.config.model.kv_heads)
        return scores[0, :, :, : position + 1].clone()


def rows_of(
    sequences: Sequence[Any], positions: list[int], refused: tuple[int, ...] = ()
) -> BatchMetadata:
    device, count = sequences[0].page_table.device, len(sequences)
    slots = [-1 if row in refused else held.slot for row, held in enumerate(sequences)]
    return BatchMetadata(
        PagedRows(
            torch.stack([held.page_table for held in sequences]),
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
        ),
        *torch.ones((2, count), dtype=torch.int32, device=device),
        torch.zeros((count, len(AnswerHeader._fields)), dtype=torch.int64, device=device),
        capacity=max(positions) + 1,
        on_host=list(zip(slots, positions, strict=True)),
    )


def load_together(parts: Sequence[tuple[Held, int]]) -> None:
    """So many tokens of each sequence of one residency."""
    shipped, rows = [], []
    for held, count in parts:
        tokens = held.tokens[:, :, :, held.resident : held.resident + count].transpose(2, 3)
        rows.append(
            ShippedRow(held.slot, held.resident, sum(part.shape[2] for part in shipped), count)
        )
        shipped.append(tokens)
        held.resident += count
    table = torch.tensor([held.pages for held, _ in parts], dtype=torch.int32)
    residency = parts[0][0].residency
    residency.load(Shipment.of(torch.cat(shipped, dim=2), table, rows))


def append_together(sequences: list[Held], layers_per_group: int = 2) -> None:
    """The next token of every sequence of one residency, a group of layers after the other."""
    first = sequences[0]
    held: Residency = first.residency
    rows = rows_of(sequences, [one.resident for one in sequences])
    for start in range(0, len(first.layers), layers_per_group):
        layers = first.layers[start : start + layers_per_group]
        up = torch.cat([one.message(layers) for one in sequences])
        held.append(rows, layers, up, first.query_ring)
    for one in sequences:
        one.resident += 1


def assert_hold_the_same(left: Held, right: Held) -> None:
    assert left.resident == right.resident
    for one, other in zip(left.read(), right.read(), strict=True):
        assert torch.equal(one, other)
    queries = left.queries()
    assert torch.equal(left.score(queries), right.score(queries))


def attended(
    residency: Residency, rows: BatchMetadata, layer: int, queries: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of queries (R, Q, Hq, D), float32."""
    out = torch.full_like(queries, torch.nan, dtype=torch.float32)
    log_sums = torch.full_like(out[..., 0], torch.nan)
    residency.attend(rows, layer, queries, out, log_sums)
    return out, log_sums
