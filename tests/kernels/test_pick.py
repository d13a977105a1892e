"""Tokens picked by the logits of their sketches: against loops, and by both versions."""

from __future__ import annotations

import math

import pytest
import torch
from sketch_cases import keys_of

from cache_rank.kernels.row_sketch import picking, reference
from cache_rank.kernels.row_sketch.reference import KEY_MOST, KEY_UNIT, TILE, RowScratch, to_keys

POISON = -7
SINKS, RECENT, MOST, SPARSE_FROM = 2, 3, 7, 10
CHUNK = 8


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that write keys take turns, and of longer requests more words are marked."""
    monkeypatch.setattr(picking, "TOKENS", 128)
    monkeypatch.setattr(picking, "PROGRAMS", 24)
    monkeypatch.setattr(picking, "FEW_WORDS", 8)


def best(keys: list[int], length: int, budget: int) -> list[int]:
    """The tokens that a request attends to, by a loop."""
    candidates = range(SINKS, length - RECENT)
    picked = sorted(candidates, key=lambda token: (-keys[token], token))[:budget]
    return [*range(SINKS), *sorted(picked), *range(length - RECENT, length)]


@pytest.mark.parametrize("distinct", [1, 3, 256])
@pytest.mark.parametrize("length", [10, 12, 13, 40])
@pytest.mark.parametrize("budget", [0, 1, MOST])
def test_the_best_keys_are_picked_the_earlier_of_equals(
    budget: int, length: int, distinct: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(0, distinct, (2, length - 1), generator=generator, dtype=torch.uint8)
    picked = reference.pick(keys, length, SINKS, RECENT, budget)
    assert picked.tolist() == [best(of_head, length, budget) for of_head in keys.tolist()]


SHORT = [13, 9, 40, 131, 12, 67, 132], [MOST, MOST, MOST, 5, MOST, 1, 6]
LONG = [259, 260, 600, 75], [3, MOST, 4, 0]
"""Lengths around those of words and programs, and of few words."""


@pytest.mark.parametrize(
    ("lengths", "budgets", "heads", "spread"),
    [
        (*SHORT, 1, 0.0),
        (*SHORT, 3, 0.05),
        (*LONG, 1, 4.0),
        (*LONG, 3, 0.05),
        (*LONG, 3, math.nan),
    ],
)
def test_a_program_picks_by_the_keys_that_it_has_made(
    lengths: list[int], budgets: list[int], spread: float, heads: int, device: torch.device
) -> None:
    """The spread is that of logits: little of it makes ties, and without numbers all are."""
    generator = torch.Generator().manual_seed(1)
    kv_heads, capacity, padded = 2, 640, 4
    units, chunks = len(lengths) * kv_heads, -(-capacity // CHUNK)
    logits = spread * torch.randn((units, capacity, padded), generator=generator)
    logits[:, 560:570] += 4 * spread  # behind the chunks that are summed at once
    sums = torch.full((units, chunks, 2, padded), torch.nan)
    for unit in range(units):
        scored = lengths[unit // kv_heads] - 1
        for chunk, part in enumerate(logits[unit, :scored].split(CHUNK)):
            sums[unit, chunk, 0] = part.amax(dim=0) / math.log(2)
            sums[unit, chunk, 1] = (part - part.amax(dim=0)).exp().sum(dim=0)
    tiles = (logits.mT.contiguous() * KEY_UNIT).round().unflatten(-1, (-1, TILE))
    tops = tiles.amax(dim=-1)
    below = (tiles - tops.unsqueeze(-1) + KEY_MOST).clamp(min=0).flatten(-2)
    scratch = RowScratch(
        torch.empty(0),
        below.to(device, torch.uint8),
        tops.to(device, torch.int32),
        sums.to(device),
        torch.zeros((units, 8, capacity // 8), dtype=torch.uint8, device=device),
        torch.zeros((units, 2, capacity // 32), dtype=torch.int32, device=device),
    )
    slots = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    table = torch.randperm((len(lengths) + 2) * capacity, generator=generator).to(torch.int32)
    table = table.view(-1, capacity)
    out = torch.full(
        (len(lengths), kv_heads, SINKS + MOST + RECENT), POISON, dtype=torch.int32, device=device
    )
    picking.pick_by_logits(
        table.to(device),
        slots.to(device),
        torch.tensor(lengths, device=device),
        torch.full((len(table),), SPARSE_FROM, dtype=torch.int32, device=device),
        torch.tensor(budgets, dtype=torch.int32, device=device),
        heads,
        CHUNK,
        SINKS,
        RECENT,
        scratch,
        out,
    )
    for unit, found in enumerate(out.flatten(0, 1).tolist()):
        request, length = unit // kv_heads, lengths[unit // kv_heads]
        if length < SPARSE_FROM:
            assert found == [POISON] * (SINKS + MOST + RECENT)
            continue
        keys = to_keys(logits[unit, : length - 1, :heads].mT).int()
        used = keys_of(scratch.keys)[unit, : length - RECENT].cpu()
        assert int((used - keys[: length - RECENT]).abs().max()) <= 1
        rows = table[slots[request], best(used.tolist(), length, budgets[request])].tolist()
        assert found[: len(rows)] == rows


def test_keys_are_log_probabilities_in_steps() -> None:
    """Of the head that has the larger one."""
    heads = torch.tensor([[3.0, 2.1, 2.0, -11.9, -12.4, -torch.inf], [-9.0, -9, -9, -9, 9, -9]])
    assert to_keys(heads[:1]).tolist() == [246, 232, 230, 8, 0, 0]
    assert to_keys(heads).tolist() == [246, 232, 230, 8, 255, 0]
    heads[1, 0] = torch.nan
    assert to_keys(heads).tolist() == [0] * 6
