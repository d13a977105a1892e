"""Scatter of shipped tokens and copies between pool rows, bit for bit against loops."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cache_rank_kernels.scatter.reference import copy_tokens, scatter_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

BITS = {2: torch.int16, 4: torch.int32}


def same_bits(left: Tensor, right: Tensor) -> bool:
    integer = BITS[left.element_size()]
    return torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))


@dataclass(frozen=True)
class Shipment:
    """Answers to some requests, and the pool they are written into."""

    key_buffers: list[Tensor]
    value_buffers: list[Tensor]
    first_rows: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        key_buffers = [buffer.clone() for buffer in self.key_buffers]
        value_buffers = [buffer.clone() for buffer in self.value_buffers]
        requests, layers, heads, entries = self.slots.shape
        for request in range(requests):
            for layer in range(layers):
                for head in range(heads):
                    for entry in range(entries):
                        place = (request, layer, head, entry)
                        if self.slots[place] < 0 or self.first_rows[request] < 0:
                            continue
                        row = int(self.first_rows[request] + self.slots[place])
                        key_buffers[layer][row, head] = self.keys[place]
                        value_buffers[layer][row, head] = self.values[place]
        return key_buffers, value_buffers


@st.composite
def shipments(draw: st.DrawFn) -> Shipment:
    """Requests own disjoint blocks of the pool; some are skipped, some entries are padding."""
    requests, layers, heads = draw(st.tuples(*[st.integers(1, 3)] * 3))
    entries, slots, head_dim = draw(st.tuples(*[st.integers(1, 4)] * 3))
    entries = min(entries, slots)
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    blocks = torch.randperm(requests)
    skipped = torch.tensor(draw(st.lists(st.booleans(), min_size=requests, max_size=requests)))
    chosen = torch.rand(requests, layers, heads, slots).argsort(-1)[..., :entries]
    padding = torch.rand(chosen.shape) < 0.3
    return Shipment(
        [random(requests * slots + 2, heads, head_dim) for _ in range(layers)],
        [random(requests * slots + 2, heads, head_dim) for _ in range(layers)],
        torch.where(skipped, -1, blocks * slots + 1),
        torch.where(padding, -1, chosen).to(torch.int32),
        random(requests, layers, heads, entries, head_dim),
        random(requests, layers, heads, entries, head_dim),
    )


@settings(deadline=None)
@given(shipments())
def test_each_token_is_written_to_its_slot_and_nothing_else_changes(shipment: Shipment) -> None:
    expected_keys, expected_values = shipment.expected()
    scatter_tokens(
        shipment.key_buffers,
        shipment.value_buffers,
        shipment.first_rows,
        shipment.slots,
        shipment.keys,
        shipment.values,
    )
    for written, expected in zip(shipment.key_buffers, expected_keys, strict=True):
        assert same_bits(written, expected)
    for written, expected in zip(shipment.value_buffers, expected_values, strict=True):
        assert same_bits(written, expected)


def test_a_skipped_request_writes_nothing() -> None:
    buffer = torch.zeros(8, 1, 2)
    scatter_tokens(
        [buffer],
        [buffer],
        torch.tensor([-1]),
        torch.tensor([[[[0, 1]]]]),
        torch.ones(1, 1, 1, 2, 2),
        torch.ones(1, 1, 1, 2, 2),
    )
    assert torch.equal(buffer, torch.zeros_like(buffer))


def test_heads_of_one_row_take_different_tokens() -> None:
    keys, values = torch.zeros(4, 2, 1), torch.zeros(4, 2, 1)
    scatter_tokens(
        [keys],
        [values],
        torch.tensor([1]),
        torch.tensor([[[[0], [2]]]], dtype=torch.int32),
        torch.tensor([[[[[5.0]], [[6.0]]]]]),
        torch.tensor([[[[[7.0]], [[8.0]]]]]),
    )
    assert keys.squeeze(-1).tolist() == [[0, 0], [5, 0], [0, 0], [0, 6]]
    assert values.squeeze(-1).tolist() == [[0, 0], [7, 0], [0, 0], [0, 8]]


def test_tokens_are_converted_to_the_dtype_of_the_pool() -> None:
    buffer = torch.zeros(2, 1, 3, dtype=torch.bfloat16)
    token = torch.tensor([1.0, 1.0 + 2**-9, -3.1415926]).view(1, 1, 1, 1, 3)
    first_slot = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    scatter_tokens([buffer], [buffer.clone()], torch.tensor([0]), first_slot, token, token)
    assert torch.equal(buffer[0, 0], token.flatten().bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_whole_tokens_between_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = [torch.randn(10, 3, 4).to(dtype) for _ in range(2)]
    values = [torch.randn(10, 3, 4).to(dtype) for _ in range(2)]
    before = [buffer.clone() for buffer in (*keys, *values)]
    source, target = torch.tensor([7, 2, 5]), torch.tensor([0, 9, 1])
    copy_tokens(keys, values, source, target)
    for buffer, old in zip((*keys, *values), before, strict=True):
        for row in range(10):
            origin = {0: 7, 9: 2, 1: 5}.get(row, row)
            assert same_bits(buffer[row], old[origin])
