"""Bulk loads into the paged pools."""

from __future__ import annotations

import pytest
import torch

from cache_rank.kernels.append import reference, triton

PAGE, LAYERS, HEADS, DIM = 4, 2, 3, 16


def pools(device: torch.device, dtype: torch.dtype, pages: int = 6):
    shape = (pages, LAYERS, HEADS, PAGE, DIM)
    return [torch.full(shape, 7.0, dtype=dtype, device=device) for _ in range(2)]


def random_shipment(device: torch.device, dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    shipment = torch.randn((2, LAYERS, count, HEADS, DIM), generator=generator) * 100
    return shipment.to(device, dtype)


@pytest.mark.parametrize("implementation", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("pages", "start", "count"),
    [
        ([3], 0, 1),
        ([3], 2, 4),
        ([3], 3, 21),
        ([3, 1], 5, 8),
        ([3, 1], 3, 21),
        ([5, 0, 3, 2, 4], 3, 9),
        ([5, 0, 3, 2, 4], 8, 12),
    ],
)
def test_every_token_is_in_its_place_and_a_ring_of_pages_keeps_the_newest(
    device: torch.device, implementation, pages: list[int], start: int, count: int
) -> None:
    shipment = random_shipment(device, torch.bfloat16, count)
    keys, values = pools(device, torch.bfloat16)
    ring = torch.tensor(pages, dtype=torch.int32, device=device)
    implementation.load_tokens(shipment, keys, values, ring, start)
    expected = torch.full((2, *keys.shape), 7.0, dtype=torch.bfloat16, device=device)
    for token in range(count):  # the later of two tokens in one place stays
        page = pages[(start + token) // PAGE % len(pages)]
        expected[:, page, :, :, (start + token) % PAGE] = shipment[:, :, token]
    assert torch.equal(torch.stack((keys, values)), expected)
