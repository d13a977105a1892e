"""Attention over rows of a pool: the reference against SDPA, Triton against the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cache_rank.kernels.attend import reference, triton

pytestmark = pytest.mark.usefixtures("few_splits")

ALWAYS, MOST, SPARSE_FROM = 20, 580, 700


class Step(NamedTuple):
    queries: Tensor
    keys: Tensor
    values: Tensor
    picked: Tensor
    row_table: Tensor
    slots: Tensor
    lengths: Tensor
    sparse_from: Tensor
    budgets: Tensor
    always: int
    scale: float


def a_step(
    lengths: list[int],
    device: torch.device,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    always_dense: tuple[int, ...] = (),
    budgets: list[int] | None = None,
) -> Step:
    """A decode step of random values whose tokens lie scattered in the pool.

    Behind the rows that a sparse request attends to are rows of no pool.
    """
    budgets = budgets or [MOST] * len(lengths)
    generator = torch.Generator().manual_seed(2)
    slot_count = len(lengths) + 2
    slots = torch.randperm(slot_count, generator=generator)[: len(lengths)]
    context = max(lengths)
    table = torch.randperm(slot_count * context, generator=generator).to(torch.int32)
    table = table.view(slot_count, context)
    pool = torch.randn((2, table.numel(), kv_heads, head_dim), generator=generator)
    pool = pool.to(pool_dtype or dtype).to(device)
    queries = torch.randn((len(lengths), query_heads, head_dim), generator=generator)
    picked = torch.full((len(lengths), kv_heads, MOST + ALWAYS), 1 << 30, dtype=torch.int32)
    for request, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        for head in range(kv_heads):
            tokens = torch.randperm(length, generator=generator)[: budget + ALWAYS]
            picked[request, head, : len(tokens)] = table[slots[request], tokens]
    sparse_from = torch.full((slot_count,), SPARSE_FROM, dtype=torch.int32)
    sparse_from[slots[list(always_dense)]] = 1 << 30
    return Step(
        queries.to(device, dtype),
        pool[0],
        pool[1],
        picked.to(device),
        table.to(device),
        slots.to(device),
        torch.tensor(lengths, device=device),
        sparse_from.to(device),
        torch.tensor(budgets, dtype=torch.int32, device=device),
        ALWAYS,
        head_dim**-0.5,
    )


def attended(implementation: Any, step: Step, **options: float) -> Tensor:
    out = torch.empty(step.queries.shape, dtype=step.queries.dtype, device=step.queries.device)
    implementation.attend_rows(*step, out, **options)
    return out


def assert_same(step: Step, **scales: float) -> None:
    tolerance = 1e-5 if step.keys.dtype == torch.float32 else 2e-2
    got, expected = (attended(each, step, **scales) for each in (triton, reference))
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_request_attends_to_its_picked_rows_or_to_all(
    pool_dtype: torch.dtype, device: torch.device
) -> None:
    lengths, budgets = [5, 699, 700, 1000, 800], [MOST, MOST, MOST, 30, 0]
    step = a_step(lengths, device, pool_dtype=pool_dtype, budgets=budgets)
    k_scale, v_scale = 0.5, 3.0
    got = attended(reference, step, k_scale=k_scale, v_scale=v_scale)
    for request, length in enumerate(step.lengths.tolist()):
        for query_head in range(4):
            head = query_head // 2
            rows = step.row_table[step.slots[request], :length]
            if length >= SPARSE_FROM:
                rows = step.picked[request, head, : budgets[request] + ALWAYS]
            key = step.keys.float()[rows.long(), head] * k_scale
            value = step.values.float()[rows.long(), head] * v_scale
            query = step.queries[request, query_head]
            expected = scaled_dot_product_attention(query[None], key, value)[0]
            torch.testing.assert_close(got[request, query_head], expected, atol=1e-4, rtol=1e-4)


def test_requests_attend_to_as_many_rows_as_each_may(device: torch.device) -> None:
    """None of them more than it has: the last has fewer tokens than it may attend to."""
    budgets = [0, 1, 44, 300, MOST, MOST]
    step = a_step([900, 700, 1100, 701, 1000, 550], device, budgets=budgets)
    step.sparse_from.fill_(500)
    assert_same(step)


def test_lengths_around_blocks_and_splits(device: torch.device) -> None:
    assert_same(a_step([1, 33, 64, 127, 129, 300, 699, 700], device, kv_heads=1))


def test_a_long_dense_request_beside_sparse_ones(device: torch.device) -> None:
    assert_same(a_step([800, 1000, 700], device, always_dense=(1,)))


def test_rounding_depends_on_no_other_request_where_it_must_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "LAUNCH", triton.LAUNCH._replace(programs=12))
    step = a_step([1000, 650, 90, 800, 2000, 700], device)
    first: Any = {
        name: getattr(step, name)[:1]
        for name in ("queries", "picked", "slots", "lengths", "budgets")
    }
    for invariant in (True, False):
        alone, together = (
            attended(triton, each, batch_invariant=invariant)
            for each in (step._replace(**first), step)
        )
        assert torch.equal(alone, together[:1]) is invariant


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("at_once", [16, 20])
def test_a_program_for_each_request_and_head(
    at_once: int, pool_dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty programs, which run at the same time or do not."""
    monkeypatch.setattr(triton, "LAUNCH", triton.LAUNCH._replace(programs=16))
    monkeypatch.setattr(triton, "ONE_EACH", triton.ONE_EACH._replace(programs=at_once))
    lengths = [3, 40, 300, 800, 129] * 2
    assert_same(a_step(lengths, device, 2, 2, 64, torch.bfloat16, pool_dtype))


@pytest.mark.parametrize(
    ("shape", "is_fp8"),
    [
        ((1, 1, 64, torch.bfloat16), True),
        ((4, 2, 128, torch.float32), True),
        ((3, 1, 128, torch.bfloat16), False),
        ((16, 1, 256, torch.float32), False),
    ],
    ids=str,
)
def test_heads_and_types(shape: tuple[Any, ...], is_fp8: bool, device: torch.device) -> None:
    """Query heads, KV heads, D and dtype."""
    pool_dtype = torch.float8_e4m3fn if is_fp8 else None
    step = a_step([11, 300, 800], device, *shape, pool_dtype)
    assert_same(step, **({"k_scale": 0.5, "v_scale": 1.5} if is_fp8 else {}))


def test_queries_may_lie_in_a_wider_tensor(device: torch.device) -> None:
    step = a_step([11, 800], device)
    wide = torch.full((2, 3 * 4, 64), torch.nan, device=device)
    wide[:, 4:8] = step.queries
    strided = step._replace(queries=wide[:, 4:8])
    assert strided.queries.stride(0) > 4 * 64
    torch.testing.assert_close(attended(triton, strided), attended(triton, step))
