"""The checksum of slots: the same on both ranks, and different when anything has moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.checksum.reference import slots_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_slots(dtype: torch.dtype, count: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, count, 8).to(dtype), torch.randn(2, 3, count, 8).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_depends_on_contents_and_not_on_memory_layout(dtype: torch.dtype) -> None:
    keys, values = random_slots(dtype)
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (keys, values)]
    assert slots_checksum(*strided) == slots_checksum(keys, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["layers", "heads", "slots"])
def test_changes_when_two_entries_swap(dimension: int, dtype: torch.dtype) -> None:
    keys, values = random_slots(dtype)
    count = keys.shape[dimension]
    original = slots_checksum(keys, values)
    for first in range(count):
        for second in range(first + 1, count):
            order = list(range(count))
            order[first], order[second] = second, first
            index = torch.tensor(order)
            swapped = keys.index_select(dimension, index), values.index_select(dimension, index)
            assert slots_checksum(*swapped) != original
            assert slots_checksum(swapped[0], values) != original
            assert slots_checksum(keys, swapped[1]) != original


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_changes_with_any_single_bit(part: int, dtype: torch.dtype) -> None:
    slots = random_slots(dtype, count=1)
    original = slots_checksum(*slots)
    octets = slots[part].view(torch.uint8).flatten()
    for octet in range(octets.numel()):
        for bit in range(8):
            octets[octet] ^= 1 << bit
            assert slots_checksum(*slots) != original
            octets[octet] ^= 1 << bit
    assert slots_checksum(*slots) == original
