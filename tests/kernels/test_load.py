"""Bulk loads into the paged pools, and the 8-bit copy of the keys that loads and appends make."""

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


@pytest.mark.parametrize("count", [1, 5, 9])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_reference_puts_every_token_in_its_place(start: int, count: int) -> None:
    cpu = torch.device("cpu")
    pages = torch.tensor([5, 0, 3, 2, 4], dtype=torch.int32)
    keys, values = pools(cpu, torch.float32)
    shipment = random_shipment(cpu, torch.float32, count)
    reference.load_tokens(shipment, keys, values, pages, start)
    written = torch.zeros_like(keys, dtype=torch.bool)
    for token in range(count):
        page, offset = pages[(start + token) // PAGE], (start + token) % PAGE
        written[page, :, :, offset] = True
        assert torch.equal(keys[page, :, :, offset], shipment[0, :, token])
        assert torch.equal(values[page, :, :, offset], shipment[1, :, token])
    assert (keys[~written] == 7).all()
    assert (values[~written] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 9), (8, 12)])
def test_triton_loads_what_the_reference_loads(
    device: torch.device, dtype: torch.dtype, start: int, count: int
) -> None:
    pages = torch.tensor([5, 0, 3, 2, 4], dtype=torch.int32, device=device)
    shipment = random_shipment(device, dtype, count)
    held = []
    for implementation in (reference, triton):
        tensors = pools(device, dtype)
        implementation.load_tokens(shipment, *tensors, pages, start)
        held.append(tensors)
    for expected, actual in zip(*held, strict=True):
        assert torch.equal(expected.float(), actual.float())


@pytest.mark.parametrize("implementation", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize("pages", [[3], [3, 1]])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (2, 4), (5, 8), (3, 21)])
def test_pages_that_are_a_ring_keep_the_newest_tokens(
    device: torch.device, implementation, pages: list[int], start: int, count: int
) -> None:
    shipment = random_shipment(device, torch.float32, count)
    keys, values = pools(device, torch.float32)
    ring = torch.tensor(pages, dtype=torch.int32, device=device)
    implementation.load_tokens(shipment, keys, values, ring, start)
    expected = torch.full((2, *keys.shape), 7.0, device=device)
    for token in range(count):  # the later of two tokens in one place stays
        page = pages[(start + token) // PAGE % len(pages)]
        expected[:, page, :, :, (start + token) % PAGE] = shipment[:, :, token]
    assert torch.equal(torch.stack((keys, values)), expected)
