"""Tokens picked from keys: the reference and Triton against loops."""

from __future__ import annotations

import pytest
import torch

from cache_rank.kernels.pick import reference, triton
from cache_rank.kernels.pick.reference import to_keys

POISON = -7
SINKS, RECENT = 2, 3


def random_rows(
    lengths: list[int], context: int, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of scattered rows of a pool, and the slots of requests, in no order."""
    slots = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    table = torch.randperm((len(lengths) + 2) * context, generator=generator).to(torch.int32)
    return table.view(-1, context).to(device), slots.to(device)


@pytest.mark.parametrize("implementation", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize("lengths", [[40], [13, 9, 11, 12, 100, 300], [4200]])
@pytest.mark.parametrize("distinct", [3, 1 << 16])
def test_the_best_keys_are_picked_the_earlier_of_equals(
    implementation, lengths: list[int], distinct: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    budget, kv_heads, context = 7, 2, 5000
    keys = torch.randint(0, distinct, (len(lengths), kv_heads, context), generator=generator)
    table, slots = random_rows(lengths, context, generator, device)
    sparse_from = torch.full((len(table),), 10, dtype=torch.int32)  # less than what is attended to
    out = torch.full(
        (len(lengths), kv_heads, SINKS + budget + RECENT), POISON, dtype=torch.int32, device=device
    )
    implementation.pick_tokens(
        keys.to(device, torch.uint16),
        table,
        slots,
        torch.tensor(lengths, device=device),
        sparse_from.to(device),
        SINKS,
        RECENT,
        out,
    )
    for request, length in enumerate(lengths):
        for head in range(kv_heads):
            if length < 10:
                assert (out[request, head] == POISON).all()
                continue
            own = keys[request, head].tolist()
            tokens = sorted(range(SINKS, length - RECENT), key=lambda t: (-own[t], t))[:budget]
            tokens = [*range(SINKS), *sorted(tokens), *range(length - RECENT, length)]
            rows = table[slots[request], tokens].tolist()
            assert out[request, head].tolist() == rows + [POISON] * (12 - len(rows))


def test_scores_keep_their_order_as_keys() -> None:
    scores = torch.tensor([-torch.inf, -40.0, -24.0, -1.0, -0.9, 0.0, 7.9, 50.0, torch.inf])
    keys = to_keys(scores).tolist()
    assert keys == sorted(keys)
    assert (keys[0], keys[-1], to_keys(torch.tensor([torch.nan])).item()) == (0, 65535, 0)
