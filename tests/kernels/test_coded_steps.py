"""Steps on tokens held as codes: Triton against the reference, bit for bit but for scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coded_cases import (
    FORMATS,
    KV_HEADS,
    LAYERS,
    NARROW,
    READINGS,
    Format,
    assert_same,
    copy_of,
    empty,
    every_format,
    every_reading,
    load,
    on,
    random_shipment,
)
from torch import Tensor

from cache_rank.kernels.coded import reference
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.score import triton as score
from cache_rank.kernels.wire.reference import to_wire, wire_width

RESIDENT = (600, 1, 300, 513)


def four_sequences(
    held_as: Format, device: torch.device, dtype: torch.dtype, **shape: int
) -> tuple[CodedTokens, Tensor]:
    """RESIDENT tokens in slots 0 to 3; with the page table of all."""
    tokens = empty(held_as, device, dtype, **shape)
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(12, generator=generator).view(4, 3).to(device, torch.int32)
    for slot, count in enumerate(RESIDENT):
        load(tokens, table[slot], slot, 0, random_shipment(tokens, count, seed=slot))
    return tokens, table


@every_format
@pytest.mark.parametrize(
    ("start", "count", "dtype"),
    [
        (0, 1, torch.float32),
        (0, 255, NARROW),
        (0, 700, torch.float32),
        (100, 500, NARROW),
        (255, 1, NARROW),
        (383, 2, torch.float32),
        (511, 130, torch.float16),
    ],
    ids=str,
)
def test_triton_encodes_of_a_shipment_what_the_reference_encodes(
    device: torch.device, held_as: Format, start: int, count: int, dtype: torch.dtype
) -> None:
    tokens = empty(held_as, device, dtype)
    shipment = random_shipment(tokens, start + count)
    pages = on(device, 5, 0, 11)
    if start:
        load(tokens, pages, 2, 0, shipment[:, :, :start].contiguous())
    found = []
    for encode_groups in (reference.encode_groups, held_as.triton.encode_groups):
        found.append(copy_of(tokens))
        new = shipment[:, :, start:].contiguous()
        rows = (pages[None], on(device, 2), on(device, start))
        encode_groups(found[-1], *rows, count, range(LAYERS), new)
    assert_same(*found)


@every_format
def test_triton_encodes_of_a_step_what_the_reference_encodes(
    device: torch.device, held_as: Format
) -> None:
    """Rows that complete a group, that do not, and that are refused."""
    tokens = empty(held_as, device, torch.float32)
    table = torch.arange(12, device=device, dtype=torch.int32).view(4, 3)
    for slot in range(4):
        load(tokens, table[slot], slot, 0, random_shipment(tokens, 511, seed=slot))
        ring = tokens.rings[slot % 2]
        ring[slot, :, :, 511 % ring.shape[3]] = slot - 1.5
    for slots, starts in (((3, -1, 1, 0), (511, 511, 400, 511)), ((), ())):
        found = []
        for encode_groups in (reference.encode_groups, held_as.triton.encode_groups):
            found.append(copy_of(tokens))
            rows = (table[: len(slots)], on(device, *slots), on(device, *starts))
            encode_groups(found[-1], *rows, 1, range(1, LAYERS))
        assert_same(*found)
        if slots:
            assert not torch.equal(found[0].planes[0][0], tokens.planes[0][0])
            assert found[0].resident[:, 1:].amax(dim=1).tolist() == [512, 401, 511, 512]


@pytest.mark.parametrize(
    ("held_as", "part", "wrong"),
    [
        (FORMATS["quantspec"], 0, float("nan")),
        (FORMATS["quantspec"], 1, float("inf")),
        (FORMATS["lynx"], 1, float("nan")),
    ],
    ids=["quantspec-keys", "quantspec-values", "lynx-values"],
)
def test_what_is_not_finite_is_noted_by_its_place(
    device: torch.device, held_as: Format, part: int, wrong: float
) -> None:
    tokens = empty(held_as, device, torch.float32)
    shipment = random_shipment(tokens, 600)
    shipment[part, 1, 77, 0, -1] = wrong
    shipment[part, 0, 33, 1, 3] = wrong
    rows = (on(device, 1, 2, 3)[None], on(device, 0), on(device, 0))
    for encode_groups in (reference.encode_groups, held_as.triton.encode_groups):
        tokens.not_finite.zero_()
        encode_groups(tokens, *rows, 600, range(LAYERS), shipment)
        assert int(tokens.not_finite) == 1 + (part * LAYERS + 1) * KV_HEADS


@every_format
@pytest.mark.parametrize(
    ("dtype", "capacity"), [(torch.float32, 0), (torch.float32, 1), (NARROW, 40)], ids=str
)
def test_triton_gathers_what_the_reference_gathers(
    device: torch.device, held_as: Format, dtype: torch.dtype, capacity: int
) -> None:
    tokens, table = four_sequences(held_as, device, dtype)
    slots, positions = on(device, 2, -1, 0, 3), on(device, 299, 0, 599, 512)
    generator = torch.Generator().manual_seed(0)
    entering = torch.randint(-200, 600, (4, 1, KV_HEADS, capacity), generator=generator)
    entering = entering.to(device, torch.int32).clamp(max=positions.view(-1, 1, 1, 1))
    rows = (table[[2, 1, 0, 3]], slots, positions)
    found = []
    for gather_codes in (reference.gather_codes, held_as.triton.gather_codes):
        for shipped_as in (dtype, torch.int8):
            shape = (2, *entering.shape, wire_width(head_dim_of(tokens), shipped_as))
            out = torch.full(shape, 7.0, device=device).to(shipped_as)
            gather_codes(tokens, *rows, 1, entering, out[0], out[1])
            found.append(out)
    as_held, *by_reference = found[:2]
    assert torch.equal(as_held, found[2])
    assert as_held.isfinite().all()
    left_alone = (entering < 0) | (slots < 0).view(-1, 1, 1, 1)
    assert (as_held[:, left_alone] == 7.0).all()
    for one, other in zip(by_reference, found[3:], strict=True):
        expected = to_wire(as_held, one.dtype)
        if one.dtype == torch.int8:
            expected[:, left_alone] = 7
        assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(other.view(torch.uint8), expected.view(torch.uint8))


def test_what_decodes_beyond_the_range_of_the_dtype_is_gathered_as_its_largest_number(
    device: torch.device,
) -> None:
    held_as = FORMATS["quantspec"]
    tokens, table = four_sequences(held_as, device, torch.float16)
    for planes in tokens.planes:
        planes[2].fill_(60000.0)
    entering = torch.arange(300, dtype=torch.int32, device=device).expand(1, 1, KV_HEADS, 300)
    rows = (table[:1], on(device, 0), on(device, 599))
    found = []
    for gather_codes in (reference.gather_codes, held_as.triton.gather_codes):
        shape = (*entering.shape, head_dim_of(tokens))
        outs = [torch.zeros(shape, dtype=torch.float16, device=device) for _ in range(2)]
        gather_codes(tokens, *rows, 0, entering.contiguous(), *outs)
        found.append(torch.stack(outs))
    assert torch.equal(*found)
    assert found[0].max() == torch.finfo(torch.float16).max


def head_dim_of(tokens: CodedTokens) -> int:
    return tokens.rings[0].shape[-1]


def scored(
    score_codes: Any,
    tokens: CodedTokens,
    queries: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    capacity: int,
    **options: Any,
) -> Tensor:
    count, layers, query_heads, head_dim = queries.shape
    kv_heads, device = tokens.rings[0].shape[2], queries.device
    out = torch.full((count, layers, kv_heads, capacity), 7.0, device=device)
    workspace = score.score_workspace(
        count, layers, kv_heads, query_heads // kv_heads, capacity, device
    )
    for _ in range(2):  # the workspace is ready for the next launch
        score_codes(tokens, queries, *rows, 1, head_dim**-0.5, workspace, out, **options)
    return out


def tolerance(held_as: Format, tokens: CodedTokens, queries: Tensor) -> float:
    """A logit is off by what its query and codes were rounded, and a score by twice that; see
    `split_digits`. Float32 sums round beside it."""
    head_dim = queries.shape[-1]
    folded = float(queries.abs().max()) * held_as.largest_scale(tokens.planes[0])
    rounding = held_as.largest_code * 2.0**-14
    if queries.is_cuda:
        rounding += held_as.rounding_on_gpu
    return 2 * head_dim**0.5 * folded * rounding + 1e-4


@pytest.mark.parametrize(
    ("reading", "group"),
    [
        ("quantspec 4", 1),
        ("quantspec 4", 3),
        ("quantspec 8", 4),
        ("quantspec 8", 8),
        ("lynx anchor", 8),
        ("lynx anchor, large alpha", 4),
        ("lynx full", 1),
        ("lynx full", 3),
    ],
)
def test_triton_scores_as_the_reference_but_for_the_rounding_of_the_query(
    device: torch.device, reading: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "CHUNK_TOKENS", 256)  # several programs a row
    held_as = READINGS[reading]
    tokens, table = four_sequences(held_as, device, torch.float16)
    generator = torch.Generator().manual_seed(2)
    queries = 2 * torch.randn((4, 1, KV_HEADS * group, head_dim_of(tokens)), generator=generator)
    queries = queries.to(device)
    rows = (table[[2, 1, 0, 3]], on(device, 2, -1, 0, 3), on(device, 299, 5, 599, 512))
    expected = scored(reference.score_codes, tokens, queries, rows, 601)
    score_codes = held_as.triton.score_codes
    actual = scored(score_codes, tokens, queries, rows, 601, rounded=False, chunk=256)
    allowed = tolerance(held_as, tokens, queries)
    torch.testing.assert_close(actual, expected, atol=allowed, rtol=0)
    assert (actual[1] == 7.0).all()


@pytest.mark.parametrize(
    "reading",
    [
        "quantspec 4",
        *(
            pytest.param(reading, marks=pytest.mark.thorough)
            for reading in ("quantspec 8", "lynx anchor", "lynx full")
        ),
    ],
)
def test_scores_do_not_depend_on_what_is_scored_beside(device: torch.device, reading: str) -> None:
    held_as = READINGS[reading]
    tokens, table = four_sequences(held_as, device, torch.float16)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn((4, 1, 4, head_dim_of(tokens)), generator=generator).to(device)
    slots, positions = on(device, 0, 1, 2, 3), on(device, *(count - 1 for count in RESIDENT))
    together = scored(held_as.triton.score_codes, tokens, queries, (table, slots, positions), 600)
    for row, count in enumerate(RESIDENT):
        one = slice(row, row + 1)
        rows = (table[one], slots[one], positions[one])
        alone = scored(held_as.triton.score_codes, tokens, queries[one], rows, 600)
        assert torch.equal(alone[0, ..., :count], together[row, ..., :count])


@pytest.mark.gpu
@every_reading
def test_triton_at_full_size(held_as: Format) -> None:
    device, count = torch.device("cuda"), 20001
    tokens = empty(held_as, device, torch.bfloat16, pages=80, layers=2, kv_heads=8, head_dim=128)
    shipment = random_shipment(tokens, count)
    generator = torch.Generator(device).manual_seed(0)
    pages = torch.randperm(80, generator=generator, device=device).to(torch.int32)
    load(tokens, pages, 1, 0, shipment)
    by_triton = copy_of(empty(held_as, device, torch.bfloat16, 80, 2, 8, 128))
    rows = (pages[None], on(device, 1), on(device, 0))
    held_as.triton.encode_groups(by_triton, *rows, count, range(2), shipment)
    assert_same(by_triton, tokens._replace(rings=by_triton.rings))

    queries = torch.randn((1, 1, 32, 128), generator=generator, device=device)
    rows = (pages[None], on(device, 1), on(device, count - 1))
    expected = scored(reference.score_codes, tokens, queries, rows, 20480)
    actual = scored(held_as.triton.score_codes, tokens, queries, rows, 20480, rounded=False)
    allowed = tolerance(held_as, tokens, queries)
    torch.testing.assert_close(actual, expected, atol=allowed, rtol=0)

    entering = torch.randint(-1, count, (1, 1, 8, 3000), generator=generator, device=device)
    entering = entering.to(torch.int32)
    found = []
    for gather_codes in (reference.gather_codes, held_as.triton.gather_codes):
        outs = torch.zeros((2, 1, 1, 8, 3000, 128), dtype=torch.bfloat16, device=device)
        gather_codes(tokens, *rows, 1, entering, outs[0], outs[1])
        found.append(outs)
    assert torch.equal(*found)
