"""Tokens picked by the logits of their sketches: against loops, and by both versions."""

from __future__ import annotations

import pytest
import torch

from cache_rank.kernels.row_sketch import picking, reference
from cache_rank.kernels.row_sketch.reference import RowScratch, to_keys

POISON = -7
SINKS, RECENT, BUDGET, SPARSE_FROM = 2, 3, 7, 10
CHUNK = 32


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs pick of a unit, and add up more counts than they load at once."""
    monkeypatch.setattr(picking, "_PART_TOKENS", 64)


def best(keys: list[int], length: int) -> list[int]:
    """The tokens that a request attends to, by a loop."""
    candidates = range(SINKS, length - RECENT)
    picked = sorted(candidates, key=lambda token: (-keys[token], token))[:BUDGET]
    return [*range(SINKS), *sorted(picked), *range(length - RECENT, length)]


@pytest.mark.parametrize("distinct", [1, 3, 256])
@pytest.mark.parametrize("length", [10, 12, 13, 40])
def test_the_best_keys_are_picked_the_earlier_of_equals(length: int, distinct: int) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(0, distinct, (2, length - 1), generator=generator, dtype=torch.uint8)
    picked = reference.pick(keys, length, SINKS, RECENT, BUDGET)
    assert picked.tolist() == [best(of_head, length) for of_head in keys.tolist()]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("spread", [0.0, 0.05, 4.0])
@pytest.mark.parametrize("lengths", [[40], [13, 9, 11, 12, 100, 300], [64, 65, 67, 68], [2500]])
def test_programs_of_a_unit_pick_what_one_would(
    lengths: list[int], spread: float, heads: int, device: torch.device
) -> None:
    """By the keys that they themselves have made; spread is that of logits, which makes ties."""
    generator = torch.Generator().manual_seed(1)
    kv_heads, capacity, padded = 2, 2600, 4
    units, chunks = len(lengths) * kv_heads, -(-capacity // CHUNK)
    parts = -(-capacity // picking.part_tokens(padded))
    logits = spread * torch.randn((units, capacity, padded), generator=generator)
    sums = torch.full((units, chunks, 2, padded), torch.nan)
    for unit in range(units):
        scored = lengths[unit // kv_heads] - 1
        for chunk, part in enumerate(logits[unit, :scored].half().float().split(CHUNK)):
            sums[unit, chunk, 0] = part.amax(dim=0)
            sums[unit, chunk, 1] = (part - part.amax(dim=0)).exp().sum(dim=0)
    empty = torch.empty(0)
    scratch = RowScratch(
        empty,
        logits.to(device, torch.float16),
        sums.to(device),
        torch.zeros((units, capacity), dtype=torch.uint8, device=device),
        torch.full((units, parts, 256), 99, dtype=torch.int16, device=device),
    )
    slots = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    table = torch.randperm((len(lengths) + 2) * capacity, generator=generator).to(torch.int32)
    table = table.view(-1, capacity)
    out = torch.full(
        (len(lengths), kv_heads, SINKS + BUDGET + RECENT), POISON, dtype=torch.int32, device=device
    )
    picking.pick_by_logits(
        table.to(device),
        slots.to(device),
        torch.tensor(lengths, device=device),
        torch.full((len(table),), SPARSE_FROM, dtype=torch.int32, device=device),
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
            assert found == [POISON] * 12
            continue
        own = logits[unit, : length - 1, :heads].half().float()
        keys = to_keys((own - own.logsumexp(dim=0)).amax(dim=-1)).int()
        used = scratch.keys[unit, : length - 1].cpu().int()
        assert int((used - keys).abs().max()) <= 1
        rows = table[slots[request], best(used.tolist(), length)].tolist()
        assert found == rows + [POISON] * (12 - len(rows))


def test_scores_keep_their_order_as_keys() -> None:
    scores = [-torch.inf, -40.0, -16.0, -15.9, -1.0, -0.9, 0.0, 7.9, torch.inf, torch.nan]
    assert to_keys(torch.tensor(scores)).tolist() == [0, 0, 0, 1, 239, 241, 255, 255, 255, 0]
