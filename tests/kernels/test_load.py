"""Bulk loads into the paged pools, and the 8-bit copy of the keys that loads and appends make."""

from __future__ import annotations

import pytest
import torch

from cache_rank.kernels.append import reference, triton
from cache_rank.kernels.fp8.reference import round_to_fp8
from cache_rank.kernels.score import reference as score_reference
from cache_rank.kernels.score import triton as score_triton

PAGE, LAYERS, HEADS, DIM = 4, 2, 3, 16


def pools(device: torch.device, dtype: torch.dtype, pages: int = 6):
    shape = (pages, LAYERS, HEADS, PAGE, DIM)
    coarse = torch.full(shape, 3.0, device=device).to(torch.float8_e4m3fn)
    return [*(torch.full(shape, 7.0, dtype=dtype, device=device) for _ in range(2)), coarse]


def random_shipment(device: torch.device, dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    shipment = torch.randn((2, LAYERS, count, HEADS, DIM), generator=generator) * 100
    shipment[0, 0, 0, 0, :2] = torch.tensor([1e4, -1e4])  # beyond the range of 8 bits
    return shipment.to(device, dtype)


@pytest.mark.parametrize("count", [1, 5, 9])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_reference_puts_every_token_in_its_place(start: int, count: int) -> None:
    cpu = torch.device("cpu")
    pages = torch.tensor([5, 0, 3, 2, 4], dtype=torch.int32)
    keys, values, coarse = pools(cpu, torch.float32)
    shipment = random_shipment(cpu, torch.float32, count)
    reference.load_tokens(shipment, keys, values, pages, start, coarse)
    written = torch.zeros_like(keys, dtype=torch.bool)
    for token in range(count):
        page, offset = pages[(start + token) // PAGE], (start + token) % PAGE
        written[page, :, :, offset] = True
        assert torch.equal(keys[page, :, :, offset], shipment[0, :, token])
        assert torch.equal(values[page, :, :, offset], shipment[1, :, token])
        rounded = shipment[0, :, token].clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(coarse.float()[page, :, :, offset], rounded)
    assert (keys[~written] == 7).all()
    assert (values[~written] == 7).all()
    assert (coarse.float()[~written] == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 9), (8, 12)])
def test_triton_loads_what_the_reference_loads(
    device: torch.device, dtype: torch.dtype, coarse: bool, start: int, count: int
) -> None:
    pages = torch.tensor([5, 0, 3, 2, 4], dtype=torch.int32, device=device)
    shipment = random_shipment(device, dtype, count)
    if coarse and device.type == "cpu":
        # The interpreter rounds to 8 bits toward zero: take numbers that are exact there.
        shipment = (shipment / 64).round().clamp(-8, 8)
    held = []
    for implementation in (reference, triton):
        tensors = pools(device, dtype)
        copy = tensors[2] if coarse else None
        implementation.load_tokens(shipment, tensors[0], tensors[1], pages, start, copy)
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
    keys, values, _ = pools(device, torch.float32)
    ring = torch.tensor(pages, dtype=torch.int32, device=device)
    implementation.load_tokens(shipment, keys, values, ring, start)
    expected = torch.full((2, *keys.shape), 7.0, device=device)
    for token in range(count):  # the later of two tokens in one place stays
        page = pages[(start + token) // PAGE % len(pages)]
        expected[:, page, :, :, (start + token) % PAGE] = shipment[:, :, token]
    assert torch.equal(torch.stack((keys, values)), expected)


def test_append_keeps_the_copy_beside_the_keys(device: torch.device) -> None:
    up = torch.randint(-8, 8, (2, 1, 2 * HEADS + 2 * HEADS, DIM)).to(device, torch.float32)
    slots = torch.tensor([1, -1], dtype=torch.int32, device=device)
    positions = torch.tensor([6, 2], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 1], [2, 3]], dtype=torch.int32, device=device)
    held = []
    for implementation in (reference, triton):
        keys, values, coarse = pools(device, torch.float32)
        ring = torch.zeros((2, LAYERS, 2 * HEADS, 3, DIM), device=device)
        implementation.append_step(up, keys, values, ring, table, slots, positions, 1, coarse)
        assert torch.equal(coarse.float()[1, 1, :, 2], keys[1, 1, :, 2])
        held.append((keys, values, coarse.float(), ring))
    for expected, actual in zip(*held, strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.gpu
def test_scores_by_the_copy_equal_scores_by_the_same_keys_in_full_precision() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    pool = torch.randn((8, 2, 8, 256, 128), generator=generator, device="cuda")
    coarse = round_to_fp8(pool)
    queries = torch.randn((2, 2, 32, 128), generator=generator, device="cuda")
    table = torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4)
    slots = torch.tensor([0, 1], device="cuda", dtype=torch.int32)
    positions = torch.tensor([1023, 700], device="cuda", dtype=torch.int32)
    scores = []
    for implementation, keys, options in (
        (score_reference, coarse.float(), {}),
        (score_triton, coarse, {"rounded": False}),
    ):
        out = torch.zeros((2, 2, 8, 1024), device="cuda")
        workspace = implementation.score_workspace(2, 2, 8, 4, 1024, out.device)
        rows = (table, slots, positions)
        implementation.score_step(queries, keys, *rows, 0, 0.09, workspace, out, **options)
        scores.append(out)
    # Products of 8-bit numbers are summed to about 14 bits on Hopper.
    torch.testing.assert_close(scores[0], scores[1], atol=4e-3, rtol=1e-4)
