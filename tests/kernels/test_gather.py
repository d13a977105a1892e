"""Gather of the tokens to ship: both implementations against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.gather import reference, triton
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.wire.reference import to_wire, wire_width

IMPLEMENTATIONS = (reference, triton)
POISON = 7.0
FIRST_LAYER = 1


def random_entering(
    tokens: list[int], layers: int, kv_heads: int, capacity: int, generator: torch.Generator
) -> Tensor:
    """(R, L, Hkv, C) int32: ascending positions below each row's tokens, padded at the end."""
    entering = torch.full((len(tokens), layers, kv_heads, capacity), -1, dtype=torch.int32)
    for row, count in enumerate(tokens):
        for of_head in entering[row].flatten(0, 1):
            enters = int(torch.randint(min(count, capacity) + 1, (), generator=generator))
            chosen = torch.randperm(count, generator=generator)[:enters].sort().values
            of_head[:enters] = chosen.to(torch.int32)
    return entering


def rows_of(table: Tensor, slots: Tensor) -> PagedRows:
    """Positions are not read."""
    return PagedRows(table, slots.to(table.device), torch.empty(0))


def random_step(
    device: torch.device,
    tokens: list[int],
    slots: list[int],
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    capacity: int = 5,
    page_tokens: int = 8,
) -> tuple[Tensor, Tensor, PagedRows, int, Tensor]:
    """What `gather_step` reads."""
    generator = torch.Generator().manual_seed(0)
    rows, max_pages = len(tokens), max(tokens, default=0) // page_tokens + 2
    shape = (rows * max_pages, layers + 2, kv_heads, page_tokens, head_dim)
    keys, values = torch.randn((2, *shape), generator=generator).to(device, dtype)
    table = torch.randperm(rows * max_pages, generator=generator).view(rows, max_pages)
    for row, count in enumerate(tokens):
        table[row, (count + page_tokens - 1) // page_tokens :] = 2**30  # must not be followed
    return (
        keys,
        values,
        rows_of(table.to(device, torch.int32), torch.tensor(slots, dtype=torch.int32)),
        FIRST_LAYER,
        random_entering(tokens, layers, kv_heads, capacity, generator).to(device),
    )


def poisoned(step, dtype: torch.dtype | None = None) -> Tensor:
    keys, entering = step[0], step[-1]
    dtype = dtype or keys.dtype
    shape = (2, *entering.shape, wire_width(keys.shape[-1], dtype))
    return torch.full(shape, POISON, device=keys.device).to(dtype)


def gather(implementation: Any, step, dtype: torch.dtype | None = None) -> Tensor:
    """What is gathered, in the dtype of the pools if no other is given."""
    out = poisoned(step, dtype)
    implementation.gather_step(*step, out[0], out[1])
    return out


def gather_by_loops(step) -> Tensor:
    keys, values, (table, slots, _), first_layer, entering = step
    page_tokens = keys.shape[3]
    out = poisoned(step)
    for place in (entering >= 0).nonzero().tolist():
        row, layer, head, entry = place
        if slots[row] < 0:
            continue
        position = int(entering[row, layer, head, entry])
        page = int(table[row, position // page_tokens])
        source = (page, first_layer + layer, head, position % page_tokens)
        out[0, row, layer, head, entry] = keys[source]
        out[1, row, layer, head, entry] = values[source]
    return out


@pytest.mark.parametrize(
    ("tokens", "slots", "shape"),
    [
        ([], [], {}),
        ([0], [0], {}),
        ([1], [0], {}),
        ([9], [-1], {}),
        ([20], [0], {"capacity": 0}),
        ([8, 30, 0, 17], [3, 0, 1, -1], {}),
        ([50, 33], [1, 0], {"layers": 1, "kv_heads": 1, "capacity": 1, "dtype": torch.float16}),
        ([50, 33], [1, 0], {"layers": 3, "head_dim": 32, "capacity": 7}),
        ([50, 33], [1, 0], {"head_dim": 64, "capacity": 40, "dtype": torch.bfloat16}),
        ([50, 33], [1, 0], {"head_dim": 128, "capacity": 20, "dtype": torch.float16}),
    ],
    ids=str,
)
def test_reads_the_tokens_that_enter_and_leaves_padding_alone(
    device: torch.device,
    implementation: Any,
    tokens: list[int],
    slots: list[int],
    shape: dict[str, Any],
) -> None:
    step = random_step(device, tokens, slots, **shape)
    step[-1][..., 1:2] = -1  # also between the entries
    expected = gather_by_loops(step)
    assert torch.equal(gather(implementation, step), expected)
    written = to_wire(expected, torch.int8)
    written[(expected == POISON).all(-1)] = int(POISON)
    assert same_bits(gather(implementation, step, torch.int8), written)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_is_written_in_int8_as_by_the_reference(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Those that are not finite too: beside numbers of their size, and of any."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    if dtype == torch.bfloat16 and device.type == "cpu":  # the interpreter reads them wrongly
        is_subnormal = numbers.abs() < torch.finfo(dtype).smallest_normal
        numbers = torch.where(is_subnormal, 0, numbers)
    mixed = numbers[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    slots, table = torch.zeros((2, 1), dtype=torch.int32, device=device)
    entering = torch.arange(512, dtype=torch.int32, device=device).view(1, 1, 1, 512)
    pools = (part.view(1, 1, 1, 512, 128).to(device) for part in (numbers, mixed))
    step = (*pools, rows_of(table.view(1, 1), slots), 0, entering)
    expected = gather(reference, step, torch.int8)
    assert torch.equal(gather(triton, step, torch.int8), expected)
    assert torch.equal(
        expected[0].flatten(0, -2).cpu(), to_wire(numbers.view(512, 128), torch.int8)
    )


def test_more_entries_than_one_program_takes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_BLOCK_ELEMENTS", 64)
    step = random_step(device, [40, 30], [0, 1], capacity=19)
    assert torch.equal(gather(triton, step), gather(reference, step))


@pytest.mark.gpu
def test_pools_of_more_than_2_31_elements() -> None:
    device = torch.device("cuda")
    keys = torch.randn((256, 36, 8, 256, 128), dtype=torch.bfloat16, device=device)
    values = keys.flip(0)
    table = torch.randperm(256, device=device).view(2, 128).to(torch.int32)
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    entering = random_entering([128 * 256, 100 * 256 + 3], 6, 8, 96, generator).to(device)
    step = (keys, values, rows_of(table, slots), 30, entering)
    assert torch.equal(gather(triton, step), gather(reference, step))
    assert same_bits(gather(triton, step, torch.int8), gather(reference, step, torch.int8))
