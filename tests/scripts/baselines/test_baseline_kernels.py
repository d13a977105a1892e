"""Selection with the current query: the reference against naive python, Triton against it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from scripts.baselines import kernels, reference
from scripts.baselines.reference import Batch, Budget

TOKENS = Budget(sinks=3, recent=5, selected=9, page=1)
PAGES = Budget.of_pages(sinks=3, recent=5, selected=7, page=4)
BUDGETS = [TOKENS, PAGES, Budget(0, 0, 1, 1), Budget.of_pages(0, 0, 1, 4)]


class Case(NamedTuple):
    """A batch over a pool whose rows are shuffled by pages."""

    queries: Tensor
    keys: Tensor
    batch: Batch


def case(
    lengths: list[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    pool_page: int = 1,
    device: torch.device | str = "cpu",
) -> Case:
    generator = torch.Generator().manual_seed(0)
    context, rows = -(-max(*lengths, 64) // 64) * 64, len(lengths)
    pages = (rows + 1) * context // pool_page
    order = torch.randperm(pages, generator=generator)[:, None] * pool_page
    table = (order + torch.arange(pool_page)).reshape(rows + 1, context).to(torch.int32)
    keys = torch.randn((pages * pool_page, heads[1], head_dim), generator=generator)
    queries = torch.randn((rows, heads[0], head_dim), generator=generator)
    return Case(
        queries.to(device, dtype),
        keys.to(device, dtype),
        Batch(
            table.to(device),
            torch.randperm(rows + 1, generator=generator)[:rows].to(device),
            torch.tensor(lengths, device=device),
            pool_page,
        ),
    )


def naive_parts(length: int, budget: Budget) -> tuple[list[int], list[int]]:
    """Tokens that are always attended to, and first tokens of the candidate pages."""
    always = set(range(min(budget.sinks, length)))
    oldest_recent = length - 1 - budget.recent
    candidates = []
    for first in range(0, length, budget.page):
        if first + budget.page <= oldest_recent - oldest_recent % budget.page:
            if first not in always:
                candidates.append(first)
        else:
            always |= set(range(first, min(first + budget.page, length)))
    return sorted(always), candidates


# The reference, against naive python.


def test_page_scores_bound_every_logit_of_the_page() -> None:
    given, bounds = with_bounds(case([45, 26, 10], pool_page=4), PAGES)
    out = torch.full((3, 2, 16), torch.nan)
    reference.score_pages(given.queries, bounds, given.batch, PAGES, out)
    for row, (slot, length) in enumerate(
        zip(given.batch.slots.tolist(), given.batch.lengths.tolist(), strict=True)
    ):
        _, candidates = naive_parts(length, PAGES)
        scored = {int(page) for page in (~out[row, 0].isnan()).nonzero().flatten()}
        assert scored == {first // 4 for first in candidates}
        for first in candidates:
            rows = given.batch.table[slot, first : first + 4].to(torch.int64)
            for kv_head in range(2):
                queries = given.queries[row, 2 * kv_head : 2 * kv_head + 2]
                products = queries[:, None] * given.keys[rows, kv_head]  # (2, 4, D)
                bound = float(products.amax(dim=1).sum(dim=-1).max())
                assert products.sum(dim=-1).max() <= bound + 1e-5
                assert out[row, kv_head, first // 4].item() == pytest.approx(bound, abs=1e-4)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_lists_hold_what_is_always_attended_to_and_the_best(budget: Budget) -> None:
    lengths = [1, 4, 12, 17, 18, 19, 33, 64]
    given = case(lengths, pool_page=budget.page)
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 6, (len(lengths), 2, 64 // budget.page), generator=generator).float()
    scores[0::2, :, ::5] = torch.nan
    scores[:, :, ::7] = -torch.inf
    out = torch.full((len(lengths), 2, budget.width), -1, dtype=torch.int32)
    reference.select(scores, given.batch, budget, out)
    for row, (slot, length) in enumerate(zip(given.batch.slots.tolist(), lengths, strict=True)):
        always, candidates = naive_parts(length, budget)
        for head in range(2):

            def rank(first: int) -> tuple[float, int]:
                score = scores[row, head, first // budget.page].item()  # noqa: B023
                return (-math.inf if math.isnan(score) else score, first)

            best = sorted(candidates, key=rank, reverse=True)[: budget.selected // budget.page]
            tokens = always + [
                first + i for first in sorted(best, reverse=True) for i in range(budget.page)
            ]
            listed = [int(given.batch.table[slot, token]) * 2 + head for token in tokens]
            assert out[row, head].tolist() == listed + [-1] * (budget.width - len(listed))


# Triton, against the reference.

SHAPES = [
    ((4, 2), 16, torch.float32),
    ((2, 2), 24, torch.bfloat16),
    ((5, 1), 32, torch.float32),
    ((6, 2), 16, torch.bfloat16),
]
LENGTHS = [1, 17, 18, 40, 64]


def with_bounds(given: Case, budget: Budget) -> tuple[Case, Tensor]:
    entries = given.keys.shape[0] // budget.page
    bounds = given.keys.new_zeros((entries, given.keys.shape[1], 2, given.keys.shape[2]))
    starts = torch.zeros_like(given.batch.lengths)
    reference.build_bounds(given.keys, given.batch, starts, 64, budget.page, bounds)
    return given, bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pool_page", [1, 4])
def test_triton_bounds(device: torch.device, dtype: torch.dtype, pool_page: int) -> None:
    given = case([30, 13, 8, 1], (4, 2), 24, dtype, pool_page, device)
    starts = torch.tensor([9, 0, 7, 0], device=device)
    found, expected = (
        torch.zeros((given.keys.shape[0] // pool_page, 2, 2, 24), dtype=dtype, device=device)
        for _ in range(2)
    )
    for module, bounds in ((kernels, found), (reference, expected)):
        module.build_bounds(given.keys, given.batch, starts, 8, 4, bounds)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), SHAPES, ids=str)
def test_triton_page_scores(
    device: torch.device, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    given, bounds = with_bounds(case(LENGTHS, heads, head_dim, dtype, 4, device), PAGES)
    found, expected = (torch.zeros((len(LENGTHS), heads[1], 16), device=device) for _ in range(2))
    for module, out in ((kernels, found), (reference, expected)):
        module.score_pages(given.queries, bounds, given.batch, PAGES, out)
    chosen = must_choose(given, PAGES)
    assert chosen.tolist() == [length > 18 for length in LENGTHS]
    assert torch.allclose(found[chosen], expected[chosen], atol=1e-4)


def must_choose(given: Case, budget: Budget) -> Tensor:
    return budget.attended_of(given.batch.lengths) < given.batch.lengths


@pytest.mark.parametrize(
    ("budget", "heads", "kind"),
    [
        (TOKENS, 1, "random"),
        (TOKENS, 2, "ties"),
        (TOKENS, 2, "extreme"),
        (PAGES, 1, "ties"),
        (PAGES, 2, "random"),
        (PAGES, 1, "extreme"),
        (BUDGETS[2], 2, "random"),
        (BUDGETS[3], 2, "extreme"),
    ],
    ids=str,
)
def test_triton_lists(device: torch.device, budget: Budget, heads: int, kind: str) -> None:
    lengths = [1, 4, 12, 17, 18, 19, 33, 64]
    given = case(lengths, pool_page=budget.page, device=device)
    compare_lists(given, budget, scores_of(kind, (len(lengths), heads, 64 // budget.page), device))


def scores_of(kind: str, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(shape, generator=generator)
    if kind == "ties":
        scores = (scores * 2).round() * 0.0 if shape[1] == 1 else (scores * 2).round()
    if kind == "extreme":
        pool = torch.tensor([torch.nan, -torch.inf, torch.inf, -0.0, 0.0, 1e-42, -1e38, 3.0])
        scores = pool[torch.randint(0, len(pool), shape, generator=generator)]
    return scores.to(device)


def compare_lists(given: Case, budget: Budget, scores: Tensor) -> None:
    found, expected = (
        torch.full((*scores.shape[:2], budget.width), -1, dtype=torch.int32, device=scores.device)
        for _ in range(2)
    )
    for module, out in ((kernels, found), (reference, expected)):
        module.select(scores, given.batch, budget, out)
    assert torch.equal(found, expected)


def test_triton_lists_of_many_blocks(device: torch.device) -> None:
    lengths = [5000, 2200]
    given = case(lengths, (2, 1), device=device)
    compare_lists(given, Budget(4, 64, 1000, 1), scores_of("ties", (2, 1, 5056), device))
    compare_lists(given, Budget(4, 64, 1000, 1), scores_of("random", (2, 1, 5056), device))


@pytest.mark.gpu
def test_large_batches_on_a_gpu() -> None:
    device = torch.device("cuda")
    lengths: Any = torch.randint(1, 8000, (24,), generator=torch.Generator().manual_seed(0))
    given = case(lengths.tolist(), (32, 8), 128, torch.bfloat16, 16, device)
    pages = Budget.of_pages(4, 64, 512, 16)
    given, bounds = with_bounds(given, pages)
    built = torch.zeros_like(bounds)
    starts = torch.zeros_like(given.batch.lengths)
    kernels.build_bounds(given.keys, given.batch, starts, 512, 16, built)
    assert torch.equal(built, bounds)
    found, expected = (
        torch.zeros((24, 8, given.batch.table.shape[1] // 16), device=device) for _ in range(2)
    )
    for module, out in ((kernels, found), (reference, expected)):
        module.score_pages(given.queries, bounds, given.batch, pages, out)
    chosen = must_choose(given, pages)
    torch.testing.assert_close(found[chosen], expected[chosen], atol=1e-2, rtol=1e-5)
    compare_lists(given, pages, found)
