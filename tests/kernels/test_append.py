"""Tokens enter the paged pools, one a row or in bulk: both implementations against loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.append import reference, triton
from cache_rank.kernels.rows import PagedRows, Shipment, ShippedRow

IMPLEMENTATIONS = (reference, triton)
POISON = 7.0


@dataclass(frozen=True)
class Step:
    """Tokens of a step for the middle layers of pools that have one layer more on each side."""

    up: Tensor
    pools: tuple[Tensor, Tensor, Tensor]
    rows: PagedRows

    def appended_by(self, implementation: Any) -> tuple[Tensor, ...]:
        pools = tuple(pool.clone() for pool in self.pools)
        implementation.append_step(self.up, *pools, self.rows, 1)
        return pools

    def appended_by_loops(self) -> tuple[Tensor, ...]:
        keys, values, ring = (pool.clone() for pool in self.pools)
        query_heads, window = ring.shape[2:4]
        kv_heads, page_tokens = keys.shape[2:4]
        for row, (slot, position) in enumerate(
            zip(self.rows.slots.tolist(), self.rows.positions.tolist(), strict=True)
        ):
            if slot < 0:
                continue
            page = int(self.rows.page_table[row, position // page_tokens])
            for layer, heads in enumerate(self.up[row], start=1):
                ring[slot, layer, :, position % window] = heads[:query_heads]
                keys[page, layer, :, position % page_tokens] = heads[query_heads:-kv_heads]
                values[page, layer, :, position % page_tokens] = heads[-kv_heads:]
        return keys, values, ring


def random_step(
    device: torch.device,
    positions: list[int],
    slots: list[int],
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    window: int = 4,
    page_tokens: int = 8,
) -> Step:
    generator = torch.Generator().manual_seed(0)
    rows, max_pages = len(positions), max(positions, default=0) // page_tokens + 2
    pages = rows * max_pages
    up = torch.randn((rows, layers, query_heads + 2 * kv_heads, head_dim), generator=generator)
    table = torch.randperm(pages, generator=generator).view(rows, max_pages).to(torch.int32)
    for row, position in enumerate(positions):
        table[row, position // page_tokens + 1 :] = 2**30  # must not be followed

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, POISON, dtype=dtype, device=device)

    pool = (pages, layers + 2, kv_heads, page_tokens, head_dim)
    ring = (max(slots, default=0) + 1, layers + 2, query_heads, window + 1, head_dim)
    return Step(
        up.to(device, dtype),
        (poisoned(*pool), poisoned(*pool), poisoned(*ring)),
        PagedRows(
            table.to(device),
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
        ),
    )


def assert_same_pools(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for pool, expected in zip(left, right, strict=True):
        assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("positions", "slots", "shape"),
    [
        ([], [], {}),
        ([0], [0], {}),
        ([5], [-1], {}),
        ([7, 8, 9], [2, 0, 1], {}),  # the last of a page, the first of the next
        ([23, 4, 0, 5, 31], [3, -1, 0, 2, 1], {}),
        ([19, 3], [1, 0], {"layers": 1, "query_heads": 1, "kv_heads": 1, "window": 1}),
        ([19, 3], [1, 0], {"layers": 3, "query_heads": 3, "kv_heads": 1, "window": 16}),
        ([19, 3], [1, 0], {"head_dim": 128, "dtype": torch.float16}),
        ([19, 3], [1, 0], {"query_heads": 14, "head_dim": 64, "dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_writes_the_place_of_each_token_and_nothing_else(
    device: torch.device,
    implementation: Any,
    positions: list[int],
    slots: list[int],
    shape: dict[str, Any],
) -> None:
    step = random_step(device, positions, slots, **shape)
    assert_same_pools(step.appended_by(implementation), step.appended_by_loops())


def test_more_heads_than_one_program_takes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_BLOCK_ELEMENTS", 64)
    step = random_step(device, [19, 8], [1, 0], query_heads=7, kv_heads=3)
    assert_same_pools(step.appended_by(triton), step.appended_by(reference))


def test_a_table_of_one_page_makes_of_it_a_ring(device: torch.device, implementation: Any) -> None:
    step = random_step(device, [7, 29, 5], [2, -1, 0])
    rows = step.rows._replace(page_table=step.rows.slots.unsqueeze(1))
    step = Step(step.up, step.pools, rows)
    in_page = Step(step.up, step.pools, rows._replace(positions=rows.positions % 8))
    keys, values, _ = in_page.appended_by_loops()
    found = step.appended_by(implementation)
    assert_same_pools(found[:2], (keys, values))


@pytest.mark.parametrize(
    ("pages", "start", "count"),
    [
        ([3], 0, 1),
        ([3], 3, 21),
        ([3, 1], 5, 8),
        ([3, 1], 3, 21),
        ([5, 0, 3, 2, 4], 3, 9),
        ([5, 0, 3, 2, 4], 8, 12),
    ],
)
def test_tokens_of_a_shipment_are_in_place_and_a_ring_of_pages_keeps_the_newest(
    device: torch.device, implementation: Any, pages: list[int], start: int, count: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    shipment = torch.randn((2, 2, count, 3, 16), generator=generator).to(device, torch.bfloat16)
    expected = torch.full((2, 6, 2, 3, 4, 16), POISON, dtype=torch.bfloat16, device=device)
    pools = expected.clone()
    ring = torch.tensor(pages, dtype=torch.int32)
    implementation.load_tokens(Shipment.of_one(shipment, ring, 0, start), *pools)
    for token in range(count):  # the later of two tokens in one place stays
        page = pages[(start + token) // 4 % len(pages)]
        expected[:, page, :, :, (start + token) % 4] = shipment[:, :, token]
    assert torch.equal(pools, expected)


def test_tokens_of_several_sequences_in_any_order(
    device: torch.device, implementation: Any
) -> None:
    """Each has its own pages, of which one is too short for what comes."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn((2, 2, 23, 3, 16), generator=generator).to(device, torch.bfloat16)
    rows = [ShippedRow(0, 6, 15, 1), ShippedRow(2, 3, 1, 14), ShippedRow(1, 0, 16, 5)]
    table = torch.tensor([[3, 1], [0, 4], [5, 2]], dtype=torch.int32)
    expected = torch.full((2, 6, 2, 3, 4, 16), POISON, dtype=torch.bfloat16, device=device)
    pools = expected.clone()
    implementation.load_tokens(Shipment.of(tokens, table, rows), *pools)
    for pages, (_, position, first, count) in zip(table.tolist(), rows, strict=True):
        for token in range(count):
            page, offset = pages[(position + token) // 4 % 2], (position + token) % 4
            expected[:, page, :, :, offset] = tokens[:, :, first + token]
    assert torch.equal(pools, expected)


@pytest.mark.gpu
def test_pools_of_more_than_2_31_elements() -> None:
    device = torch.device("cuda")
    shape = (256, 36, 8, 256, 128)  # 2.4e9 elements
    keys, values = torch.zeros((2, *shape), dtype=torch.bfloat16, device=device)
    ring = torch.zeros((2, 36, 32, 17, 128), dtype=torch.bfloat16, device=device)
    up = torch.randn((2, 6, 48, 128), device=device).bfloat16()
    table = torch.tensor([[9, 255], [254, 3]], dtype=torch.int32, device=device)
    slots, positions = torch.tensor([[1, 0], [300, 255]], dtype=torch.int32, device=device)
    triton.append_step(up, keys, values, ring, PagedRows(table, slots, positions), 30)
    for row, (slot, page, position) in enumerate(((1, 255, 300), (0, 254, 255))):
        assert torch.equal(keys[page, 30:, :, position % 256], up[row, :, 32:40])
        assert torch.equal(values[page, 30:, :, position % 256], up[row, :, 40:])
        assert torch.equal(ring[slot, 30:, :, position % 17], up[row, :, :32])
    assert int(keys.count_nonzero()) == int(up[:, :, 32:40].count_nonzero())
    assert int(values.count_nonzero()) == int(up[:, :, 40:].count_nonzero())
