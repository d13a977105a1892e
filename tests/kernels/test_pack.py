"""Packing of q, k and v into the message: both implementations against loops."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.pack import reference, triton

IMPLEMENTATIONS = (reference, triton)
POISON = 7.0


def random_layer(
    device: torch.device,
    batch: int,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Views of one fused (B, (Hq + 2 Hkv) D) projection."""
    generator = torch.Generator().manual_seed(batch)
    heads = query_heads + 2 * kv_heads
    fused = torch.randn((batch, heads * head_dim), generator=generator).to(device, dtype)
    parts = fused.split([count * head_dim for count in (query_heads, kv_heads, kv_heads)], dim=1)
    return [part.unflatten(1, (-1, head_dim)) for part in parts]


def pack(
    implementation: Any, index: list[int], layer: int, parts: list[Tensor], max_rows: int = 5
) -> Tensor:
    queries, keys, _ = parts
    heads, head_dim = queries.shape[1] + 2 * keys.shape[1], queries.shape[2]
    staging = torch.full(
        (max_rows, 3, heads, head_dim), POISON, dtype=queries.dtype, device=queries.device
    )
    exchange_index = torch.tensor(index, dtype=torch.int32, device=queries.device)
    implementation.pack_layer(staging, exchange_index, layer, *parts)
    return staging


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ([], (4, 2, 16, torch.float32)),
        ([-1], (3, 1, 32, torch.bfloat16)),
        ([0], (2, 2, 64, torch.float16)),
        ([3, -1, 0, 1], (4, 2, 16, torch.bfloat16)),
        ([3, -1, 0, 1], (14, 2, 64, torch.float32)),
        ([-1, -1, 4], (3, 1, 32, torch.float16)),
    ],
    ids=str,
)
def test_writes_the_rows_that_take_part(
    device: torch.device, implementation: Any, index: list[int], shape: tuple[Any, ...]
) -> None:
    parts = random_layer(device, len(index), *shape)
    for layer in range(3):
        staging = pack(implementation, index, layer, parts)
        expected = torch.full_like(staging, POISON)
        for row, target in enumerate(index):
            if target >= 0:
                expected[target, layer] = torch.cat([part[row] for part in parts])
        assert torch.equal(staging, expected)


def test_more_heads_than_one_program_takes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_BLOCK_ELEMENTS", 64)
    parts = random_layer(device, 3, 7, 3)
    assert torch.equal(pack(triton, [2, 0, 1], 2, parts), pack(reference, [2, 0, 1], 2, parts))


def test_separate_tensors_are_packed_as_views_of_one(device: torch.device) -> None:
    parts = random_layer(device, 3)
    separate = [part.contiguous() for part in parts]
    turned = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
    expected = pack(reference, [0, 2, 1], 0, parts)
    assert torch.equal(pack(triton, [0, 2, 1], 0, separate), expected)
    assert torch.equal(pack(triton, [0, 2, 1], 0, turned), expected)


def test_projections_are_converted_to_the_dtype_of_the_message(
    device: torch.device, implementation: Any
) -> None:
    """Not to bfloat16: the interpreter cuts the bits off that should be rounded."""
    parts = random_layer(device, 2)
    staging = torch.zeros((2, 1, 8, 16), dtype=torch.float16, device=device)
    implementation.pack_layer(staging, torch.tensor([1, 0], device=device), 0, *parts)
    assert torch.equal(staging[:, 0], torch.cat(parts, dim=1).half().flip(0))


@pytest.mark.parametrize("index", [[], [-1, -1], [1, 0]], ids=str)
def test_a_stamp_is_left_even_where_no_row_takes_part(
    device: torch.device, implementation: Any, index: list[int]
) -> None:
    parts = random_layer(device, len(index))
    staging = torch.zeros((2, 1, 8, 16), device=device)
    exchange_index = torch.tensor(index, dtype=torch.int32, device=device)
    stamps = torch.zeros(4, dtype=torch.int64, device=device)
    implementation.pack_layer(staging, exchange_index, 0, *parts, stamps, 2)
    time.sleep(0.01)
    implementation.stamp(stamps, 3)
    assert stamps[:2].tolist() == [0, 0]
    assert int(stamps[3] - stamps[2]) > 1_000_000
    assert int(stamps[2]) > 0


@pytest.mark.gpu
def test_triton_in_a_graph_at_full_size() -> None:
    device = torch.device("cuda")
    parts = random_layer(device, 256, 32, 8, 128, torch.bfloat16)
    staging = torch.full((200, 36, 48, 128), POISON, dtype=torch.bfloat16, device=device)
    index = torch.full((256,), -1, dtype=torch.int32, device=device)
    stamps = torch.zeros(36, dtype=torch.int64, device=device)
    triton.pack_layer(staging, index, 0, *parts, stamps, 0)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(36):
            triton.pack_layer(staging, index, layer, *parts, stamps, layer)
    index[torch.randperm(256, device=device)[:200]] = torch.arange(
        200, dtype=torch.int32, device=device
    )
    graph.replay()
    expected = torch.full_like(staging, POISON)
    for layer in range(36):
        reference.pack_layer(expected, index, layer, *parts)
    assert torch.equal(staging, expected)
    assert (stamps.diff() >= 0).all()


@pytest.mark.parametrize(
    ("width", "has_residual", "index"),
    [
        (8, True, []),
        (40, False, [-1]),
        (40, True, [1, -1, 0, 3]),
        (4100, False, [1, -1, 0, 3]),
        (4100, True, [1, -1, 0, 3]),
    ],
    ids=str,
)
def test_the_hidden_state_of_the_rows_that_take_part_is_packed(
    device: torch.device, implementation: Any, width: int, has_residual: bool, index: list[int]
) -> None:
    generator = torch.Generator().manual_seed(width)
    states = torch.randn((2, len(index), width), generator=generator).to(device)
    hidden, residual = states[0], states[1] if has_residual else None
    message = torch.full((5, 16 + width), POISON, device=device)
    staging = message[:, 16:]  # behind the tokens of each row
    exchange_index = torch.tensor(index, dtype=torch.int32, device=device)
    implementation.pack_hidden(staging, exchange_index, hidden, residual)
    expected = torch.full_like(message, POISON)
    for row, target in enumerate(index):
        if target >= 0:
            expected[target, 16:] = hidden[row] if residual is None else hidden[row] + residual[row]
    assert torch.equal(message, expected)


def test_messages_whose_rows_hold_more_than_tokens(
    device: torch.device, implementation: Any
) -> None:
    parts = random_layer(device, 3)
    index = torch.tensor([0, 2, 1], dtype=torch.int32, device=device)
    message = torch.full((5, 3 * 8 * 16 + 24), POISON, device=device)
    staging = message[:, : 3 * 8 * 16].view(5, 3, 8, 16)
    implementation.pack_layer(staging, index, 1, *parts)
    assert torch.equal(staging, pack(reference, [0, 2, 1], 1, parts))
    assert (message[:, 3 * 8 * 16 :] == POISON).all()
