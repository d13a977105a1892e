"""Steps on HACK codes with all their options: Triton against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coded_cases import (
    KV_HEADS,
    LAYERS,
    NARROW,
    Format,
    assert_same,
    copy_of,
    empty,
    largest,
    load,
    on,
    random_shipment,
)
from torch import Tensor

from cache_rank.kernels.coded import reference
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.hack import triton
from cache_rank.kernels.hack.reference import GROUP, HackCodec
from cache_rank.kernels.score import triton as score
from cache_rank.kernels.wire.reference import to_wire, wire_width

RESIDENT = (300, 1, 127, 512)
HEAD_DIM = 64


def hack(bits: int = 2, partition: int = 64, seed: int | None = None) -> Format:
    return Format(
        "hack",
        lambda dtype: (
            HackCodec(True, dtype, bits, partition, seed),
            HackCodec(False, dtype, bits, partition, seed),
        ),
        group_tokens=GROUP,
        ring=GROUP,
        largest_scale=lambda planes: largest(planes[2]),
        largest_code=2**bits - 1,
    )


OPTIONS = {
    "2 bits": hack(),
    "2 bits, 32": hack(partition=32),
    "2 bits, 16, stochastic": hack(partition=16, seed=65535),
    "4 bits": hack(bits=4),
    "4 bits, 16": hack(bits=4, partition=16),
    "4 bits, stochastic": hack(bits=4, seed=0),
}
every_option = pytest.mark.parametrize("held_as", OPTIONS.values(), ids=OPTIONS)


def four_sequences(
    held_as: Format, device: torch.device, dtype: torch.dtype, head_dim: int = HEAD_DIM
) -> tuple[CodedTokens, Tensor]:
    """RESIDENT tokens in slots 0 to 3; with the page table of all."""
    tokens = empty(held_as, device, dtype, layers=3, head_dim=head_dim)
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(12, generator=generator).view(4, 3).to(device, torch.int32)
    for slot, count in enumerate(RESIDENT):
        load(tokens, table[slot], slot, 0, random_shipment(tokens, count, seed=slot))
    return tokens, table


def scored(
    score_codes: Any,
    tokens: CodedTokens,
    queries: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    capacity: int,
    exact: bool = False,
    **options: Any,
) -> Tensor:
    """Of layers from the second on."""
    count, layers, query_heads, head_dim = queries.shape
    kv_heads, device = tokens.rings[0].shape[2], queries.device
    out = torch.full((count, layers, kv_heads, capacity), 7.0, device=device)
    workspace = score.score_workspace(
        count, layers, kv_heads, query_heads // kv_heads, capacity, device
    )
    score_codes(tokens, queries, *rows, 1, head_dim**-0.5, workspace, out, exact, **options)
    return out


def rounding(tokens: CodedTokens, queries: Tensor) -> float:
    """What float32 rounds of a score at most, in a handful of operations of each partition.

    The terms of a product are of the size of the ranges of queries and keys. A score is off by
    twice what its logits are.
    """
    _, minima, scales, _ = tokens.planes[0]
    of_keys = largest(minima) + 15 * largest(scales)
    head_dim = queries.shape[-1]
    sizes = head_dim * float(queries.abs().max()) * of_keys * head_dim**-0.5
    return 2 * 8 * torch.finfo(torch.float32).eps * sizes


@pytest.mark.parametrize(
    ("option", "start", "count", "dtype"),
    [
        ("2 bits", 0, 1, torch.float32),
        ("2 bits", 0, 64, NARROW),
        ("2 bits, 32", 0, 63, torch.float32),
        ("2 bits, 32", 100, 300, NARROW),
        ("2 bits, 16, stochastic", 191, 1, NARROW),
        ("2 bits, 16, stochastic", 100, 300, torch.float32),
        ("4 bits", 0, 64, torch.float16),
        ("4 bits", 191, 1, torch.float32),
        ("4 bits, 16", 100, 300, NARROW),
        ("4 bits, stochastic", 0, 64, torch.float32),
        ("4 bits, stochastic", 100, 300, NARROW),
    ],
    ids=str,
)
def test_triton_encodes_what_the_reference_encodes(
    device: torch.device, option: str, start: int, count: int, dtype: torch.dtype
) -> None:
    held_as = OPTIONS[option]
    tokens = empty(held_as, device, dtype, layers=1, head_dim=HEAD_DIM)
    shipment = random_shipment(tokens, start + count)
    shipment[:, :, ::7, 0, 5] = 0.0
    shipment[:, :, 1::7, 0, 5] = -0.0
    pages = on(device, 5, 0, 11)
    if start:
        load(tokens, pages, 2, 0, shipment[:, :, :start].contiguous())
    found = []
    for encode_groups in (reference.encode_groups, triton.encode_groups):
        found.append(copy_of(tokens))
        rows = (pages[None], on(device, 2), on(device, start))
        new = shipment[:, :, start:].contiguous()
        encode_groups(found[-1], *rows, count, range(1), new)
    assert_same(*found)


@pytest.mark.parametrize(
    ("option", "head_dim"),
    [
        ("2 bits", 128),
        ("2 bits, 32", 16),
        ("2 bits, 16, stochastic", 128),
        ("4 bits", 16),
        ("4 bits, 16", 128),
        ("4 bits, stochastic", 16),
    ],
)
def test_triton_encodes_of_a_step_what_the_reference_encodes(
    device: torch.device, option: str, head_dim: int
) -> None:
    """Rows that complete a group, that do not, and that are refused."""
    held_as = OPTIONS[option]
    tokens = empty(held_as, device, torch.float32, layers=3, head_dim=head_dim)
    table = torch.arange(12, device=device, dtype=torch.int32).view(4, 3)
    for slot in range(4):
        load(tokens, table[slot], slot, 0, random_shipment(tokens, 127, seed=slot))
        for ring in tokens.rings:
            ring[slot, :, :, 127 % ring.shape[3]] = slot - 1.5
    found = []
    for encode_groups in (reference.encode_groups, triton.encode_groups):
        found.append(copy_of(tokens))
        rows = (table, on(device, 3, -1, 1, 0), on(device, 127, 127, 100, 127))
        encode_groups(found[-1], *rows, 1, range(1, 3))
    assert_same(*found)
    assert not torch.equal(found[0].planes[0][0], tokens.planes[0][0])


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (0, float("nan")),
        (1, float("inf")),
        (0, -float("inf")),
        (0, "too far apart"),
        (1, "too far apart"),
    ],
)
def test_what_cannot_be_encoded_is_noted_by_its_place(
    device: torch.device, part: int, wrong: float | str
) -> None:
    tokens = empty(hack(), device, torch.float32, head_dim=HEAD_DIM)
    shipment = random_shipment(tokens, 130)
    if isinstance(wrong, float):
        shipment[part, -1, 77, 1, 63] = wrong
    else:
        largest = torch.finfo(torch.float32).max
        shipment[part, -1, 77, 1, 63] = largest
        shipment[part, -1, 77, 1, 62] = shipment[part, -1, 78, 1, 63] = -largest
    shipment[part, 0, 129, 1, 3] = float("nan")  # not in a complete group
    rows = (on(device, 1, 2, 3)[None], on(device, 0), on(device, 0))
    for encode_groups in (reference.encode_groups, triton.encode_groups):
        tokens.not_finite.zero_()
        encode_groups(tokens, *rows, 130, range(LAYERS), shipment)
        assert int(tokens.not_finite) == 1 + (part * LAYERS + LAYERS - 1) * KV_HEADS + 1


@pytest.mark.parametrize(
    ("option", "dtype", "shipped_as", "head_dim"),
    [
        ("2 bits", torch.float32, torch.float32, 64),
        ("2 bits, 16, stochastic", torch.float16, torch.int8, 64),
        ("4 bits", NARROW, NARROW, 64),
        ("2 bits", NARROW, torch.int8, 64),
        ("4 bits", torch.float32, torch.int8, 128),
        ("4 bits, 16", torch.float32, torch.float32, 16),
        *(
            pytest.param(option, NARROW, NARROW, 64, marks=pytest.mark.thorough)
            for option in ("2 bits, 32", "4 bits, stochastic")
        ),
    ],
    ids=str,
)
def test_triton_gathers_what_the_reference_gathers(
    device: torch.device,
    option: str,
    dtype: torch.dtype,
    shipped_as: torch.dtype,
    head_dim: int,
) -> None:
    """From codes and from rings, with padding and a refused row."""
    tokens, table = four_sequences(OPTIONS[option], device, dtype, head_dim)
    positions = on(device, 126, 0, 299, 511)
    entering = torch.randint(
        -100, 512, (4, 2, KV_HEADS, 21), generator=torch.Generator().manual_seed(0)
    )
    entering = entering.to(device, torch.int32).minimum(positions.view(-1, 1, 1, 1))
    rows = (table[[2, 1, 0, 3]], on(device, 2, -1, 0, 3), positions)
    shape = (2, *entering.shape, head_dim)
    held = torch.full(shape, 7.0, dtype=dtype, device=device)
    reference.gather_codes(tokens, *rows, 1, entering, held[0], held[1])
    assert held.isfinite().all()
    assert (held[:, entering < 0] == 7.0).all()
    assert (held[:, 1] == 7.0).all()
    width = wire_width(head_dim, shipped_as)
    found = torch.full((*shape[:-1], width), 7.0, device=device).to(shipped_as)
    triton.gather_codes(tokens, *rows, 1, entering, found[0], found[1])
    expected = to_wire(held, shipped_as)
    if shipped_as == torch.int8:
        expected[:, (entering < 0) | (rows[1] < 0).view(-1, 1, 1, 1)] = 7
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("held_as", "group", "head_dim", "exact"),
    [
        (hack(), 4, 128, False),
        (hack(), 1, 64, True),
        (hack(partition=32), 3, 128, False),
        (hack(partition=16, seed=3), 8, 32, False),
        (hack(bits=4), 4, 16, False),
        (hack(bits=4), 4, 16, True),
        (hack(bits=4, partition=16), 16, 64, False),
    ],
)
def test_triton_scores_as_the_reference(
    device: torch.device,
    held_as: Format,
    group: int,
    head_dim: int,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row of two chunks with 44 tokens in the ring, a refused row, only ring, only codes."""
    monkeypatch.setattr(score, "CHUNK_TOKENS", 256)
    tokens, table = four_sequences(held_as, device, torch.float16, head_dim)
    shape = (4, 1, KV_HEADS * group, head_dim)
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 2
    queries[0, 0, 0] = 0.5  # no range to encode
    queries = queries.to(device)
    rows = (table[[0, 3, 1, 3]], on(device, 0, -1, 1, 3), on(device, 299, 5, 0, 511))
    found = [
        scored(implementation.score_codes, tokens, queries, rows, 513, exact, **options)
        for implementation, options in ((reference, {}), (triton, {"rounded": False, "chunk": 256}))
    ]
    torch.testing.assert_close(*found, atol=rounding(tokens, queries), rtol=1e-6)
    assert (found[1][1] == 7.0).all()
    assert (found[1][0, ..., 300:] == 7.0).all()


@pytest.mark.parametrize(
    "held_as",
    [
        pytest.param(hack(), id="2 bits"),
        pytest.param(hack(bits=4, partition=16), id="4 bits, 16", marks=pytest.mark.thorough),
    ],
)
def test_scores_do_not_depend_on_what_is_scored_beside(
    device: torch.device, held_as: Format
) -> None:
    tokens, table = four_sequences(held_as, device, torch.float16)
    queries = torch.randn((4, 2, 4, HEAD_DIM), generator=torch.Generator().manual_seed(2))
    queries = queries.to(device)
    slots, positions = on(device, 0, 1, 2, 3), on(device, *(count - 1 for count in RESIDENT))
    together = scored(triton.score_codes, tokens, queries, (table, slots, positions), 512)
    for row, count in enumerate(RESIDENT):
        one = slice(row, row + 1)
        rows = (table[one], slots[one], positions[one])
        alone = scored(triton.score_codes, tokens, queries[one], rows, 512)
        assert torch.equal(alone[0, ..., :count], together[row, ..., :count])


@pytest.mark.gpu
@every_option
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (1, 64), (8, 128), (2, 256)])
def test_triton_at_full_size(held_as: Format, group: int, head_dim: int) -> None:
    """20001 tokens in bfloat16, read through a page table of 80 random pages."""
    device, count, kv_heads = torch.device("cuda"), 20001, 8
    shape = {"pages": 80, "layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
    tokens, by_triton = (empty(held_as, device, torch.bfloat16, **shape) for _ in range(2))
    pages = torch.randperm(80, device=device).to(torch.int32)
    shipment = random_shipment(tokens, count)
    load(tokens, pages, 1, 0, shipment)
    rows = (pages[None], on(device, 1), on(device, 0))
    triton.encode_groups(by_triton, *rows, count, range(2), shipment)
    assert_same(by_triton, tokens._replace(rings=by_triton.rings))

    generator = torch.Generator(device).manual_seed(0)
    queries = torch.randn((1, 1, kv_heads * group, head_dim), generator=generator, device=device)
    rows = (pages[None], on(device, 1), on(device, count - 1))
    for exact in (False, True):
        found = [
            scored(implementation.score_codes, tokens, queries, rows, 20480, exact, **options)
            for implementation, options in ((reference, {}), (triton, {"rounded": False}))
        ]
        # Keys of the ring are bfloat16, with which products of queries in parts are less exact.
        allowed = rounding(tokens, queries) + 1e-3
        torch.testing.assert_close(*found, atol=allowed, rtol=1e-6)

    entering = torch.randint(-1, count, (1, 1, kv_heads, 3000), device=device, dtype=torch.int32)
    outs = torch.zeros((2, 2, 1, 1, kv_heads, 3000, head_dim), device=device).bfloat16()
    for implementation, out in zip((reference, triton), outs, strict=True):
        implementation.gather_codes(tokens, *rows, 1, entering, out[0], out[1])
    assert torch.equal(*outs)
