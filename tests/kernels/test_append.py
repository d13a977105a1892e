"""Append of a step's tokens to the pools: reference against loops, Triton against it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.append import reference, triton
from cache_rank.kernels.rows import PagedRows

IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [reference, triton], ids=["reference", "triton"]
)
POISON = 7.0


@dataclass(frozen=True)
class Step:
    """Tokens of a step for the middle layers of pools that have one layer more on each side."""

    up: Tensor
    pools: tuple[Tensor, Tensor, Tensor]
    rows: PagedRows

    def appended_by(self, implementation) -> tuple[Tensor, ...]:
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
                for head in range(query_heads):
                    ring[slot, layer, head, position % window] = heads[head]
                for head in range(kv_heads):
                    place = (page, layer, head, position % page_tokens)
                    keys[place] = heads[query_heads + head]
                    values[place] = heads[query_heads + kv_heads + head]
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
    ("positions", "slots"),
    [
        ([], []),
        ([0], [0]),
        ([5], [-1]),
        ([7, 8, 9], [2, 0, 1]),  # the last of a page, the first of the next
        ([23, 4, 0, 5, 31], [3, -1, 0, 2, 1]),
    ],
    ids=str,
)
@IMPLEMENTATIONS
def test_writes_the_place_of_each_token_and_nothing_else(
    device: torch.device, implementation, positions: list[int], slots: list[int]
) -> None:
    step = random_step(device, positions, slots)
    assert_same_pools(step.appended_by(implementation), step.appended_by_loops())


@pytest.mark.parametrize(
    ("layers", "query_heads", "kv_heads", "head_dim", "window", "dtype"),
    [
        (1, 1, 1, 16, 1, torch.bfloat16),
        (3, 3, 1, 32, 16, torch.float32),
        (1, 2, 2, 128, 5, torch.float16),
        (2, 14, 2, 64, 2, torch.bfloat16),
    ],
)
def test_triton_equals_reference(
    device: torch.device,
    layers: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    step = random_step(
        device, [19, 3, 8], [1, -1, 0], dtype, layers, query_heads, kv_heads, head_dim, window
    )
    assert_same_pools(step.appended_by(triton), step.appended_by(reference))


def test_more_heads_than_one_program_takes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_BLOCK_ELEMENTS", 64)
    step = random_step(device, [19, 8], [1, 0], query_heads=7, kv_heads=3)
    assert_same_pools(step.appended_by(triton), step.appended_by(reference))


@IMPLEMENTATIONS
def test_a_table_of_one_page_makes_of_it_a_ring(device: torch.device, implementation) -> None:
    step = random_step(device, [7, 29, 5], [2, -1, 0])
    rows = step.rows._replace(page_table=step.rows.slots.unsqueeze(1))
    step = Step(step.up, step.pools, rows)
    in_page = Step(step.up, step.pools, rows._replace(positions=rows.positions % 8))
    keys, values, _ = in_page.appended_by_loops()
    found = step.appended_by(implementation)
    assert_same_pools(found[:2], (keys, values))


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
