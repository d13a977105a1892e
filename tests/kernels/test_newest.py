"""Attention to newest tokens: the reference against attention to all, Triton against it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.newest import reference, triton
from cache_rank.kernels.newest.reference import attend_to, merge

IMPLEMENTATIONS = (reference, triton)

GROUP = 32
NEWEST = (100, 0, 31, 63, 64, 5, 129)
"""Positions of newest tokens, around the ends of groups; two rows have the ring of another."""
SLOTS = (4, 2, 0, -1, 1, 3, 5)
SCALE = 0.3


class Case(NamedTuple):
    queries: Tensor  # (R, Q, Hq, D)
    keys: Tensor  # (S, n, Hkv, D), as are values
    values: Tensor
    older: tuple[Tensor, Tensor]

    def empty(self) -> tuple[Tensor, Tensor]:
        """What is written in place, without numbers."""
        out = torch.full_like(self.queries, torch.nan)
        return out.contiguous(), out[..., 0].float().contiguous()


def case(
    shape: tuple[int, int, int, int], group: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Random numbers; shape is (S, n, Hkv, D). The first row has nothing older."""
    torch.manual_seed(0)
    sequences, entries, kv_heads, head_dim = shape
    rows, width = len(NEWEST), 3
    keys, values = torch.randn(2, sequences, kv_heads, entries, head_dim)
    keys, values = (part.to(device, dtype).transpose(1, 2) for part in (keys, values))
    heads = kv_heads * group
    qkv = torch.randn(rows, width, heads + 1, head_dim)  # queries with strides of their own
    out, log_sums = torch.randn(rows, width, heads, head_dim), torch.randn(rows, width, heads)
    out[0], log_sums[0] = 0.0, -torch.inf
    older = out.to(device), log_sums.to(device)
    return Case(qkv.to(device, dtype)[:, :, 1:], keys, values, older)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
    return {"atol": rounding[dtype], "rtol": rounding[dtype]}


@pytest.mark.parametrize("full_groups", [0, 2])
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [(1, 64, torch.float32), (3, 16, torch.float16), (8, 128, torch.bfloat16)],
    ids=str,
)
def test_rows_attend_to_what_is_no_code(
    implementation: Any,
    device: torch.device,
    full_groups: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Entries that are of older tokens hold what is no number; a refused row has nothing newer."""
    ring = GROUP * (full_groups + 1)
    of = case((6, ring, 2, head_dim), group, dtype, device)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    positions = torch.tensor(NEWEST, dtype=torch.int32, device=device)
    expected = []
    for row, (slot, position) in enumerate(zip(SLOTS, NEWEST, strict=True)):
        held = 0 if slot < 0 else position + 1
        first = max(0, held // GROUP * GROUP - full_groups * GROUP)
        seen = torch.arange(first, held, device=device) % ring
        tokens = [part[slot, seen].transpose(0, 1)[None] for part in (of.keys, of.values)]
        all_seen = torch.ones((1, 1, len(seen)), dtype=torch.bool, device=device)
        own = attend_to(of.queries[row : row + 1], *tokens, all_seen, SCALE)
        expected.append(merge((of.older[0][row], of.older[1][row]), (own[0][0], own[1][0])))
        unused = torch.ones(ring, dtype=torch.bool, device=device)
        unused[seen] = False
        if slot >= 0:
            of.keys[slot, unused], of.values[slot, unused] = torch.nan, torch.nan
    out, log_sums = of.empty()
    at = slots, positions, GROUP
    implementation.attend_to_ring(*of[:3], *at, SCALE, of.older, out, log_sums)
    for row, (wanted, sums) in enumerate(expected):
        torch.testing.assert_close(out[row].float(), wanted, **tolerance(dtype))
        torch.testing.assert_close(log_sums[row], sums, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_older", [True, False])
@pytest.mark.parametrize(
    ("group", "width", "dtype"),
    [(1, 1, torch.float32), (3, 5, torch.float32), (4, 40, torch.bfloat16)],
    ids=str,
)
def test_tokens_of_a_round_attend_to_each_other(
    implementation: Any,
    device: torch.device,
    has_older: bool,
    group: int,
    width: int,
    dtype: torch.dtype,
) -> None:
    """Of some requests of a batch; others keep what they have."""
    torch.manual_seed(0)
    rows, kv_heads, head_dim = torch.tensor([3, 0], device=device), 2, 32
    heads = kv_heads * (group + 2)
    qkv = torch.randn(4, width, heads, head_dim).to(device, dtype)
    queries, keys, values = qkv.split((kv_heads * group, kv_heads, kv_heads), dim=2)
    older_out = torch.randn(2, width, kv_heads * group, head_dim).to(device, dtype)
    older = older_out, torch.randn(older_out.shape[:3]).to(device)
    out = torch.full_like(queries, 7.0).contiguous()
    given = older if has_older else None
    implementation.attend_to_each_other(queries, keys, values, rows, SCALE, given, out)
    assert (out[[1, 2]] == 7.0).all()
    for index, row in enumerate(rows.tolist()):
        for last in range(width):
            of_query = queries[row : row + 1, last : last + 1]
            seen = [part[row : row + 1, : last + 1].transpose(1, 2) for part in (keys, values)]
            all_seen = torch.ones((1, 1, last + 1), dtype=torch.bool, device=device)
            wanted = attend_to(of_query, *seen, all_seen, SCALE)
            if has_older:
                before = (part[index : index + 1, last : last + 1].float() for part in older)
                wanted = merge((next(before), next(before)), wanted)
            torch.testing.assert_close(out[row, last].float(), wanted[0][0, 0], **tolerance(dtype))
