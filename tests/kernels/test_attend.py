"""Attention over rows of a pool: the reference and Triton."""

from __future__ import annotations

import pytest
import torch

from cache_rank.kernels.attend import reference as attend_reference
from cache_rank.kernels.attend import triton as attend_triton


def random_rows(
    lengths: list[int], context: int, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of scattered rows of a pool, and the slots of requests, in no order."""
    slots = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    table = torch.randperm((len(lengths) + 2) * context, generator=generator).to(torch.int32)
    return table.view(-1, context).to(device), slots.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("query_heads", "kv_heads", "head_dim"), [(2, 2, 16), (12, 2, 64)])
@pytest.mark.parametrize("lengths", [[1], [11, 70, 43, 300, 64]])
def test_attention_over_rows(
    dtype: torch.dtype,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    lengths: list[int],
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(2)
    context, width = 300, 50
    table, slots = random_rows(lengths, context, generator, device)
    pool = torch.randn((2, table.numel(), kv_heads, head_dim), generator=generator)
    queries = torch.randn((len(lengths), query_heads, head_dim), generator=generator)
    pool, queries = pool.to(device, dtype), queries.to(device, dtype)
    picked = torch.zeros((len(lengths), kv_heads, width), dtype=torch.int32)
    for request, length in enumerate(lengths):
        for head in range(kv_heads):
            tokens = torch.randperm(max(length, width), generator=generator)[:width]
            picked[request, head] = table[slots[request].cpu(), tokens % context].cpu()
    step = (
        queries,
        pool[0],
        pool[1],
        picked.to(device),
        table,
        slots,
        torch.tensor(lengths, device=device),
        torch.full((len(table),), 40, dtype=torch.int32, device=device),
        head_dim**-0.5,
    )
    expected, got = torch.empty_like(queries), torch.empty_like(queries)
    attend_reference.attend_rows(*step, expected)
    attend_triton.attend_rows(*step, got)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
