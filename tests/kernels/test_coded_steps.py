"""Steps on tokens held as codes: Triton against the reference, bit for bit but for scores."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from coded_cases import (
    FORMATS,
    KV_HEADS,
    LAYERS,
    NARROW,
    assert_same,
    empty,
    load,
    on,
    random_shipment,
)
from torch import Tensor

from cache_rank.kernels.coded import reference, triton
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.rows import PagedRows, Shipment, ShippedRow
from cache_rank.kernels.score import triton as score
from cache_rank.kernels.wire.reference import to_wire, wire_width

RESIDENT = (300, 1, 127, 512)
"""Codes and newest tokens, only newest ones of no or of one group, and codes of two pages."""


def four_sequences(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int | None = None
) -> tuple[CodedTokens, Tensor]:
    """RESIDENT tokens in slots 0 to 3; with the page table of all."""
    tokens = empty(name, device, dtype, head_dim=head_dim)
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(12, generator=generator).view(4, 3).to(device, torch.int32)
    for slot, count in enumerate(RESIDENT):
        load(tokens, table[slot], slot, 0, random_shipment(tokens, count, seed=slot))
    return tokens, table


def encoded_by_both(tokens: CodedTokens, *step: Any) -> CodedTokens:
    """What is held after `encode_groups`, by the reference and by Triton."""
    found = deepcopy(tokens), deepcopy(tokens)
    for implementation, held in zip((reference, triton), found, strict=True):
        implementation.encode_groups(held, *step)
    assert_same(*found)
    return found[0]


def gathered(
    implementation: Any,
    tokens: CodedTokens,
    rows: PagedRows,
    entering: Tensor,
    shipped_as: torch.dtype | None = None,
) -> Tensor:
    """Keys and values of the second layer, with 7 where nothing is written."""
    ring = tokens.rings[0]
    dtype = shipped_as or ring.dtype
    shape = (2, *entering.shape, wire_width(ring.shape[-1], dtype))
    out = torch.full(shape, 7.0, device=ring.device).to(dtype)
    implementation.gather_codes(tokens, rows, 1, entering.contiguous(), out[0], out[1])
    return out


@pytest.mark.parametrize(
    ("name", "start", "count", "dtype"),
    [
        ("quantspec 8", 0, 255, NARROW),
        ("quantspec 8", 100, 500, torch.float32),
        ("quantspec 8", 255, 1, torch.float16),
        ("lynx full", 0, 1, torch.float32),
        ("lynx full", 255, 1, NARROW),
        ("lynx full", 100, 500, torch.float16),
        ("hack 2", 0, 64, NARROW),
        ("hack 2, 32", 0, 63, torch.float32),
        ("hack 2, 16, stochastic", 191, 1, NARROW),
        ("hack 2, 16, stochastic", 100, 300, torch.float32),
        ("hack 4", 191, 1, torch.float32),
        ("hack 4, 16", 100, 300, torch.float16),
        ("hack 4, stochastic", 100, 300, NARROW),
        ("hack 4, sums", 100, 300, torch.float32),
        ("hack 2, sums", 191, 1, NARROW),
        ("hack 4, unfinished", 100, 300, torch.float32),
        ("hack 2, unfinished", 191, 2, NARROW),
    ],
    ids=str,
)
def test_triton_encodes_of_a_shipment_what_the_reference_encodes(
    device: torch.device, name: str, start: int, count: int, dtype: torch.dtype
) -> None:
    head_dim = 64 if name.startswith("hack") else None
    tokens = empty(name, device, dtype, layers=1, head_dim=head_dim)
    shipment = random_shipment(tokens, start + count)
    shipment[:, :, ::7, 0, 5] = 0.0
    shipment[:, :, 1::7, 0, 5] = -0.0
    pages = on(device, 5, 0, 11)
    if start:
        load(tokens, pages, 2, 0, shipment[:, :, :start].contiguous())
    new = Shipment.of_one(shipment[:, :, start:].contiguous(), pages.cpu(), 2, start)
    encoded_by_both(tokens, new.rows, range(1), new)


@pytest.mark.parametrize("name", ["quantspec 8", "lynx full", "hack 2", "hack 4, unfinished"])
def test_triton_encodes_of_several_rows_what_the_reference_encodes(
    device: torch.device, name: str
) -> None:
    """A row that completes groups, and two that complete none."""
    tokens, table = four_sequences(name, device, torch.float32)
    rows = [ShippedRow(3, 512, 40, 150), ShippedRow(0, 300, 0, 1), ShippedRow(1, 1, 1, 39)]
    shipment = Shipment.of(random_shipment(tokens, 190), table[[3, 0, 1]].cpu(), rows)
    found = encoded_by_both(tokens, shipment.rows, range(LAYERS), shipment)
    alone = deepcopy(tokens)
    for slot, position, first, count in rows:
        part = shipment.tokens[:, :, first : first + count].contiguous()
        one = Shipment.of_one(part, table[slot].cpu(), slot, position)
        reference.encode_groups(alone, one.rows, range(LAYERS), one)
    assert_same(found, alone)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        ("quantspec 8", None),
        ("lynx full", None),
        ("hack 2", 128),
        ("hack 2, 32", 16),
        ("hack 2, 16, stochastic", 128),
        ("hack 4, stochastic", 16),
        ("hack 2, unfinished", 16),
    ],
)
def test_triton_encodes_of_a_step_what_the_reference_encodes(
    device: torch.device, name: str, head_dim: int | None
) -> None:
    """Rows that complete a group, that do not, and that are refused."""
    tokens = empty(name, device, torch.float32, head_dim=head_dim)
    table = torch.arange(12, device=device, dtype=torch.int32).view(4, 3)
    for slot in range(4):
        load(tokens, table[slot], slot, 0, random_shipment(tokens, 255, seed=slot))
        for ring in tokens.rings:
            ring[slot, :, :, 255 % ring.shape[3]] = slot - 1.5
    for slots, starts in (((3, -1, 1, 0), (255, 255, 100, 255)), ((), ())):
        rows = PagedRows(table[: len(slots)], on(device, *slots), on(device, *starts))
        found = encoded_by_both(tokens, rows, range(1, LAYERS))
        assert bool(slots) != torch.equal(found.planes[0][0], tokens.planes[0][0])


NAN, INFINITY, LARGEST = float("nan"), float("inf"), torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("name", "part", "wrong", "beside"),
    [
        ("quantspec 8", 0, NAN, 0.0),
        ("quantspec 8", 1, INFINITY, 0.0),
        ("lynx full", 1, NAN, 0.0),
        ("hack 2", 0, -INFINITY, 0.0),
        ("hack 2", 1, NAN, 0.0),
        ("hack 2", 0, LARGEST, -LARGEST),
        ("hack 2", 1, LARGEST, -LARGEST),
    ],
)
def test_what_cannot_be_encoded_is_noted_by_its_place(
    device: torch.device, name: str, part: int, wrong: float, beside: float
) -> None:
    """What is not finite, or too far apart."""
    tokens = empty(name, device, torch.float32)
    count = tokens.full_tokens + tokens.group_tokens + 44
    shipment = random_shipment(tokens, count)
    shipment[part, 0, 33, 1, 3] = shipment[part, 1, 47, 0, -1] = wrong
    shipment[part, 1, 47, 0, -2] = shipment[part, 1, 48, 0, -1] = beside
    shipment[part, 1, -1, 1, 3] = float("nan")  # not in a complete group
    came = Shipment.of_one(shipment, torch.tensor([1, 2, 3], dtype=torch.int32))
    for encode_groups in (reference.encode_groups, triton.encode_groups):
        tokens.not_finite.zero_()
        encode_groups(tokens, came.rows, range(LAYERS), came)
        assert int(tokens.not_finite) == 1 + (part * LAYERS + 1) * KV_HEADS


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "capacity", "is_rounded"),
    [
        ("quantspec 8", torch.float32, None, 0, False),
        ("quantspec 8", NARROW, None, 21, False),
        ("quantspec 8", torch.float32, None, 21, True),
        ("lynx full", torch.float32, None, 21, False),
        ("lynx full", NARROW, None, 1, True),
        ("hack 2", torch.float32, 64, 21, True),
        ("hack 2, 16, stochastic", torch.float16, 64, 21, False),
        ("hack 4", NARROW, 128, 21, False),
        ("hack 4, 16", torch.float32, 16, 21, True),
        ("hack 4, sums", torch.float32, 16, 21, False),
        ("hack 4, unfinished", torch.float32, 16, 21, False),
    ],
    ids=str,
)
def test_triton_gathers_what_the_reference_gathers(
    device: torch.device,
    name: str,
    dtype: torch.dtype,
    head_dim: int | None,
    capacity: int,
    is_rounded: bool,
) -> None:
    """From codes and from rings, with padding and a refused row, as they are or in int8."""
    tokens, table = four_sequences(name, device, dtype, head_dim)
    slots, positions = on(device, -1, 0, 3), on(device, 0, 299, 511)
    generator = torch.Generator().manual_seed(0)
    entering = torch.randint(-100, 512, (3, 1, KV_HEADS, capacity), generator=generator)
    entering = entering.to(device, torch.int32).minimum(positions.view(-1, 1, 1, 1))
    left_alone = (entering < 0) | (slots < 0).view(-1, 1, 1, 1)
    rows = PagedRows(table[[1, 0, 3]], slots, positions)
    expected = gathered(reference, tokens, rows, entering)
    assert expected.isfinite().all()
    assert (expected[:, left_alone] == 7.0).all()
    if is_rounded:
        expected = to_wire(expected, torch.int8)
        expected[:, left_alone] = 7
        assert torch.equal(gathered(reference, tokens, rows, entering, torch.int8), expected)
    assert torch.equal(gathered(triton, tokens, rows, entering, expected.dtype), expected)


def test_what_decodes_beyond_the_range_of_the_dtype_is_gathered_as_its_largest_number(
    device: torch.device,
) -> None:
    tokens, table = four_sequences("quantspec 8", device, torch.float16)
    for planes in tokens.planes:
        planes[2].fill_(60000.0)
    entering = on(device, *range(300)).expand(1, 1, KV_HEADS, 300)
    rows = PagedRows(table[:1], on(device, 0), on(device, 299))
    expected = gathered(reference, tokens, rows, entering)
    assert torch.equal(gathered(triton, tokens, rows, entering), expected)
    assert expected.max() == torch.finfo(torch.float16).max


def scored(
    score_codes: Any,
    tokens: CodedTokens,
    queries: Tensor,
    rows: PagedRows,
    capacity: int,
    **options: Any,
) -> Tensor:
    """Of layers from the second on."""
    count, layers, query_heads, head_dim = queries.shape
    kv_heads, device = tokens.rings[0].shape[2], queries.device
    out = torch.full((count, layers, kv_heads, capacity), 7.0, device=device)
    workspace = score.score_workspace(
        count, layers, kv_heads, query_heads // kv_heads, capacity, device
    )
    for _ in range(1 + queries.is_cuda):  # the workspace is ready for the next launch
        score_codes(tokens, queries, rows, 1, head_dim**-0.5, workspace, out, **options)
    return out


@pytest.mark.parametrize(
    ("name", "group", "head_dim"),
    [
        ("quantspec 4", 1, None),
        ("quantspec 4", 3, None),
        ("quantspec 8", 8, None),
        ("lynx anchor", 8, None),
        ("lynx anchor, large alpha", 4, None),
        ("lynx full", 3, None),
        ("hack 2", 4, 128),
        ("hack 2", 1, 64),
        ("hack 2, 32", 3, 128),
        ("hack 2, 16, stochastic", 8, 32),
        ("hack 4", 4, 16),
        ("hack 4, 16", 16, 64),
        ("hack 4, unfinished", 4, 16),
        ("hack 2, unfinished", 1, 64),
    ],
)
def test_triton_scores_as_the_reference_but_for_rounding(
    device: torch.device,
    name: str,
    group: int,
    head_dim: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of codes and newest tokens, of a refused row, of newest tokens only, of codes only."""
    for module in (score, triton):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 128)  # several programs a row
    tokens, table = four_sequences(name, device, torch.float16, head_dim)
    shape = (4, 1, KV_HEADS * group, tokens.rings[0].shape[-1])
    queries = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    queries[0, 0, 0] = 0.5  # no range to encode
    queries = queries.to(device)
    rows = PagedRows(table[[0, 3, 1, 3]], on(device, 0, -1, 1, 3), on(device, 299, 5, 0, 511))
    expected = scored(reference.score_codes, tokens, queries, rows, 513)
    actual = scored(triton.score_codes, tokens, queries, rows, 513, rounded=False)
    allowed = FORMATS[name].tolerance(tokens, queries)
    torch.testing.assert_close(actual, expected, atol=allowed, rtol=1e-6)
    assert (actual[1] == 7.0).all()
    assert (actual[0, ..., 300:] == 7.0).all()


@pytest.mark.parametrize("name", ["quantspec 4", "lynx full", "hack 2"])
def test_scores_do_not_depend_on_what_is_scored_beside(device: torch.device, name: str) -> None:
    tokens, table = four_sequences(name, device, torch.float16)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn((4, 1, 4, tokens.rings[0].shape[-1]), generator=generator).to(device)
    slots, positions = on(device, 0, 1, 2, 3), on(device, *(count - 1 for count in RESIDENT))
    together = scored(triton.score_codes, tokens, queries, PagedRows(table, slots, positions), 512)
    for row in (0, 2):
        one, count = slice(row, row + 1), RESIDENT[row]
        rows = PagedRows(table[one], slots[one], positions[one])
        alone = scored(triton.score_codes, tokens, queries[one], rows, 512)
        assert torch.equal(alone[0, ..., :count], together[row, ..., :count])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "group", "head_dim"),
    [
        *((name, 4, 128) for name in FORMATS),
        *(
            (name, *shape)
            for name in FORMATS
            if name.startswith("hack")
            for shape in ((1, 64), (8, 128), (2, 256))
        ),
    ],
)
def test_triton_at_full_size(name: str, group: int, head_dim: int) -> None:
    """20001 tokens in bfloat16, read through a page table of 80 random pages."""
    device, count, kv_heads = torch.device("cuda"), 20001, 8
    shape = {"pages": 80, "layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
    tokens, by_triton = (empty(name, device, torch.bfloat16, **shape) for _ in range(2))
    generator = torch.Generator(device).manual_seed(0)
    pages = torch.randperm(80, generator=generator, device=device).to(torch.int32)
    shipment = random_shipment(tokens, count)
    load(tokens, pages, 1, 0, shipment)
    came = Shipment.of_one(shipment, pages.cpu(), 1)
    triton.encode_groups(by_triton, came.rows, range(2), came)
    assert_same(by_triton, tokens._replace(rings=by_triton.rings))

    queries = torch.randn((1, 1, kv_heads * group, head_dim), generator=generator, device=device)
    rows = PagedRows(pages[None], on(device, 1), on(device, count - 1))
    expected = scored(reference.score_codes, tokens, queries, rows, 20480)
    actual = scored(triton.score_codes, tokens, queries, rows, 20480, rounded=False)
    allowed = FORMATS[name].tolerance(tokens, queries)
    torch.testing.assert_close(actual, expected, atol=allowed, rtol=1e-6)

    entering = torch.randint(-1, count, (1, 1, 8, 3000), generator=generator, device=device)
    entering = entering.to(torch.int32)
    expected = gathered(reference, tokens, rows, entering)
    assert torch.equal(gathered(triton, tokens, rows, entering), expected)
