"""Scatter of shipped tokens and copies of tokens: both implementations against loops."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.scatter import reference, triton
from cache_rank.kernels.scatter.reference import LayerBuffers, layer_buffers
from cache_rank.kernels.wire.reference import from_wire, to_wire

IMPLEMENTATIONS = (reference, triton)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = 7


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(*(part.contiguous().view(torch.uint8) for part in (left, right)))


def copy_of(buffers: LayerBuffers) -> LayerBuffers:
    return layer_buffers([tensor.clone() for tensor in buffers.tensors])


class Shipment(NamedTuple):
    """Answers to the rows of a step, and the pool that they are written into."""

    key_rows: LayerBuffers
    value_rows: LayerBuffers
    first_rows: Tensor
    header: Tensor
    expected: Tensor
    entering_slots: Tensor
    keys: Tensor
    values: Tensor

    def written_by_loops(self) -> tuple[LayerBuffers, LayerBuffers, list[int]]:
        key_rows, value_rows = copy_of(self.key_rows), copy_of(self.value_rows)
        matches = (self.header[:, :4] == self.expected).all(1) & (self.first_rows >= 0)
        for place in (self.entering_slots >= 0).nonzero().tolist():
            row, layer, head, _ = place
            if matches[row]:
                target = int(self.first_rows[row] + self.entering_slots[tuple(place)])
                key_rows.tensors[layer][target, head] = self.keys[tuple(place)]
                value_rows.tensors[layer][target, head] = self.values[tuple(place)]
        return key_rows, value_rows, matches.int().tolist()

    def written_by(
        self, implementation: Any, accepts: Tensor | None = None
    ) -> tuple[LayerBuffers, LayerBuffers, list[int]]:
        pools = copy_of(self.key_rows), copy_of(self.value_rows)
        applied = torch.full_like(self.first_rows, POISON)
        implementation.scatter_step(*pools, *self[2:], applied, accepts)
        return *pools, applied.tolist()


def random_buffers(shape: tuple[int, ...], layers: int, device, dtype, generator) -> LayerBuffers:
    return layer_buffers(
        [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(layers)]
    )


def random_shipment(
    device: torch.device,
    rows: int,
    layers: int,
    kv_heads: int,
    entries: int,
    slots: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Shipment:
    """Rows own disjoint blocks of the pool; the last entries are padding."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(rows, generator=generator)
    chosen = torch.rand((rows, layers, kv_heads, slots), generator=generator).argsort(-1)
    chosen = chosen[..., :entries]
    used = torch.randint(0, entries + 1, (*chosen.shape[:3], 1), generator=generator)
    padding = torch.arange(entries) >= used
    header = torch.randint(-(2**40), 2**40, (rows, 6), generator=generator)
    content = torch.randn((2, *chosen.shape, head_dim), generator=generator).to(device, dtype)
    pool = (rows * slots + 2, kv_heads, head_dim)
    return Shipment(
        random_buffers(pool, layers, device, dtype, generator),
        random_buffers(pool, layers, device, dtype, generator),
        (blocks * slots + 1).to(device, torch.int32),
        header.to(device),
        header[:, :4].contiguous().to(device),
        torch.where(padding, -1, chosen).to(device, torch.int32),
        content[0],
        content[1],
    )


def assert_same_writes(left, right) -> None:
    assert left[2:] == right[2:]
    for pool, other in zip(left[:2], right[:2], strict=True):
        assert all(map(same_bits, pool.tensors, other.tensors))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 1, 1, 16), torch.bfloat16),
        ((3, 2, 2, 5, 7, 16), torch.float32),
        ((2, 3, 1, 8, 8, 64), torch.float16),
        ((2, 1, 3, 3, 9, 128), torch.bfloat16),
    ],
    ids=str,
)
def test_writes_each_token_to_its_slot_and_nothing_else(
    device: torch.device, implementation: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    shipment = random_shipment(device, *shape, dtype)
    assert_same_writes(shipment.written_by(implementation), shipment.written_by_loops())


def test_more_entries_than_one_program_takes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_BLOCK_ELEMENTS", 64)
    shipment = random_shipment(device, 2, 2, 2, 11, 13, 16)
    assert_same_writes(shipment.written_by(triton), shipment.written_by(reference))


@pytest.mark.parametrize("column", [0, 1, 2, 3, "first row"])
def test_a_row_of_another_step_writes_nothing(
    device: torch.device, implementation: Any, column: int | str
) -> None:
    shipment = random_shipment(device, 3, 2, 2, 3, 4, 16)
    if isinstance(column, int):
        shipment.header[1, column] += 2**33  # beyond 32 bits
    else:
        shipment.first_rows[1] = -1
    written = shipment.written_by(implementation)
    assert written[2] == [1, 0, 1]
    assert_same_writes(written, shipment.written_by_loops())


def test_nothing_is_applied_when_answers_are_refused(
    device: torch.device, implementation: Any
) -> None:
    shipment = random_shipment(device, 2, 2, 2, 3, 4, 16)
    refused, accepted = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    unchanged = (shipment.key_rows, shipment.value_rows, [0, 0])
    assert_same_writes(shipment.written_by(implementation, refused), unchanged)
    assert_same_writes(shipment.written_by(implementation, accepted), shipment.written_by_loops())


def test_tokens_are_converted_to_the_dtype_of_the_pool(
    device: torch.device, implementation: Any
) -> None:
    """Not to bfloat16: the interpreter cuts the bits off that should be rounded."""
    shipment = random_shipment(device, 2, 1, 2, 2, 2, 16)
    narrow = [
        layer_buffers([tensor.half() for tensor in buffers.tensors]) for buffers in shipment[:2]
    ]
    shipment = Shipment(*narrow, *shipment[2:])
    assert_same_writes(shipment.written_by(implementation), shipment.written_by_loops())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_of_every_exponent_are_what_they_stand_for(
    device: torch.device, implementation: Any, dtype: torch.dtype
) -> None:
    shipment = random_shipment(device, 3, 2, 2, 16, 20, 64, dtype)
    written = torch.zeros_like(to_wire(shipment.keys, torch.int8))
    codes, exponents = written.split([64, 8], dim=-1)
    codes.copy_((torch.arange(codes.numel(), device=device) % 255 - 127).view(codes.shape))
    # 255 is that of a block which is not finite; 7 is the least that is written.
    exponent = 7 + torch.arange(exponents.numel(), device=device) % 249
    exponents.copy_(exponent.to(torch.uint8).view(torch.int8).view(exponents.shape))
    contents = (written, written.flip(3).contiguous())
    in_full = Shipment(*shipment[:6], *(from_wire(part, dtype) for part in contents))
    *wanted, expected = in_full.written_by_loops()
    *found, applied = Shipment(*shipment[:6], *contents).written_by(implementation)
    assert applied == expected
    assert any(tensor.isnan().any() for pool in wanted for tensor in pool.tensors)
    for pool, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(pool.tensors, other.tensors, rtol=0, atol=0, equal_nan=True)


def random_pool(
    device: torch.device, dtype: torch.dtype, rows: int = 10
) -> tuple[LayerBuffers, LayerBuffers]:
    generator = torch.Generator().manual_seed(0)
    shape = (rows, 3, 16)
    keys = random_buffers(shape, 2, device, dtype, generator)
    return keys, random_buffers(shape, 2, device, dtype, generator)


@pytest.mark.parametrize(
    ("moves", "dtype"),
    [
        ({}, torch.float32),
        ({0: 7}, torch.float16),
        ({0: 7, 9: 2, 1: 5}, torch.bfloat16),
        ({0: 7, 9: 2, 1: 5}, torch.float32),
    ],
    ids=str,
)
def test_moves_whole_tokens_of_all_layers(
    device: torch.device, implementation: Any, dtype: torch.dtype, moves: dict[int, int]
) -> None:
    keys, values = random_pool(device, dtype)
    before = [buffer.clone() for buffer in (*keys.tensors, *values.tensors)]
    source = torch.tensor([*moves.values()] * 2, dtype=torch.int64, device=device)
    target = torch.tensor(list(moves), dtype=torch.int64, device=device)
    out = torch.full((2, 2, len(source), 3, 16), POISON, dtype=dtype, device=device)
    implementation.collect_tokens(keys, values, source, out)
    implementation.copy_tokens(keys, values, source[: len(moves)], target)
    after = (*keys.tensors, *values.tensors)
    for buffer, old, collected in zip(after, before, out.flatten(0, 1), strict=True):
        assert same_bits(collected, old[source])
        for row in range(10):
            assert same_bits(buffer[row], old[moves.get(row, row)])
    put = layer_buffers([torch.zeros_like(tensor) for tensor in after])
    by_head = out[:, :, : len(moves)].transpose(2, 3).contiguous()
    implementation.put_tokens(
        *map(layer_buffers, (put.tensors[:2], put.tensors[2:])), target, *by_head
    )
    for buffer, copied in zip(put.tensors, after, strict=True):
        assert same_bits(buffer[target], copied[target])
        assert buffer.count_nonzero() == buffer[target].count_nonzero()


def test_moving_by_several_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_BLOCK_ELEMENTS", 64)
    keys, values = random_pool(device, torch.float32, rows=20)
    rows = torch.tensor([3, 9, 4, 0, 11], device=device)
    collected, expected = torch.zeros((2, 2, 2, 5, 3, 16), device=device)
    triton.collect_tokens(keys, values, rows, collected)
    reference.collect_tokens(keys, values, rows, expected)
    assert torch.equal(collected, expected)
    target = torch.tensor([1, 19, 8, 10, 2], device=device)
    triton.copy_tokens(keys, values, rows, target)
    reference.collect_tokens(keys, values, target, collected)
    assert torch.equal(collected, expected)
    target = torch.tensor([7, 0, 15, 5, 6], device=device)
    triton.put_tokens(keys, values, target, *expected.transpose(2, 3).contiguous())
    reference.collect_tokens(keys, values, target, collected)
    assert torch.equal(collected, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton_at_full_size(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    shipment = random_shipment(device, 16, 6, 8, 96, 512, 128, dtype)
    shipment.first_rows[3] = -1
    shipment.header[5, 3] += 1
    assert_same_writes(shipment.written_by(triton), shipment.written_by(reference))
    keys, values = (to_wire(part, torch.int8) for part in (shipment.keys, shipment.values))
    rounded = shipment._replace(keys=keys, values=values)
    assert_same_writes(rounded.written_by(triton), rounded.written_by(reference))
    rows = torch.randperm(16 * 512, device=device)[:4096]
    collected, expected = torch.zeros((2, 2, 6, 4096, 8, 128), dtype=dtype, device=device)
    triton.collect_tokens(*shipment[:2], rows, collected)
    reference.collect_tokens(*shipment[:2], rows, expected)
    assert torch.equal(collected, expected)
    pools = copy_of(shipment.key_rows), copy_of(shipment.value_rows)
    triton.copy_tokens(*pools, rows[:2048], rows[2048:])
    reference.copy_tokens(*shipment[:2], rows[:2048], rows[2048:])
    assert_same_writes(pools, shipment[:2])
    by_head = expected.transpose(2, 3).contiguous()
    triton.put_tokens(*pools, rows, *by_head)
    reference.put_tokens(*shipment[:2], rows, *by_head)
    assert_same_writes(pools, shipment[:2])


@pytest.mark.gpu
def test_pools_of_more_than_2_31_elements() -> None:
    device = torch.device("cuda")
    rows = 2**31 // (8 * 128) + 64
    keys = layer_buffers([torch.zeros((rows, 8, 128), dtype=torch.bfloat16, device=device)])
    shipment = random_shipment(device, 1, 1, 8, 4, 32, 128, torch.bfloat16)
    shipment.entering_slots.clamp_(min=0)
    first = torch.tensor([rows - 32], dtype=torch.int32, device=device)
    applied = torch.zeros_like(first)
    triton.scatter_step(keys, keys, first, *shipment[3:6], shipment.keys, shipment.keys, applied)
    assert applied.tolist() == [1]
    for head in range(8):
        for entry, slot in enumerate(shipment.entering_slots[0, 0, head].tolist()):
            if slot > 0:  # clamped entries all go to slot 0
                written = keys.tensors[0][rows - 32 + slot, head]
                assert torch.equal(written, shipment.keys[0, 0, head, entry])
