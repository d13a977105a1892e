"""A sketch keeps the logits of keys as well as its bits allow, and both implementations agree."""

from __future__ import annotations

import pytest
import torch
from sketch_cases import random_sketch
from torch import Tensor

from cache_rank.kernels.rows import PagedRows, Shipment, ShippedRow
from cache_rank.kernels.score import reference as score_reference
from cache_rank.kernels.score import triton as score_triton
from cache_rank.kernels.sketch import reference, triton
from cache_rank.kernels.sketch.reference import Attended, Sketch, SketchShape, attended_normalizer

PAGE = 256


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_logits_are_those_of_the_decoded_keys_less_a_constant(bits: int) -> None:
    """Elements and weights give what channels would, by the definition of the codes."""
    sketch, shape = random_sketch(2, 2, 32, bits, torch.device("cpu"))
    keys, queries = torch.randn(2, 2, 50, 32), torch.randn(2, 6, 32)
    codes = reference.encode_keys(keys, sketch, shape)
    assert codes.shape == (2, 2, 50, shape.bytes)
    rounded, elements = reference.query_weights(queries, sketch, 0.5), reference.unpack_int2(codes)
    found = rounded @ elements.mT

    steps = keys.double() @ sketch.keys.double().mT - sketch.shift.double().unsqueeze(-2)
    levels = torch.tensor([16.0] * shape.fine + [4.0] * shape.coarse)
    whole = torch.minimum((steps.floor() + levels / 2).clamp(min=0), levels - 1)
    fine, coarse = whole.split((shape.fine, shape.coarse), dim=-1)
    by_element = sketch.queries.unflatten(-2, (4, shape.bytes))[..., :, :]
    low, high = by_element[:, :, 0, : shape.fine // 2], by_element[:, :, 2, : shape.fine // 2]
    maps = torch.cat((low, high, by_element[:, :, :, shape.fine // 2 :].flatten(2, 3)), dim=2)
    weights = (queries.view(2, 2, 3, 32) * 0.5) @ maps.mT
    expected = weights.double() @ torch.cat((fine, coarse), dim=-1).mT
    half_a_unit = rounded.abs().amax(dim=-1, keepdim=True) / reference.WEIGHT_RANGE / 2
    bound = half_a_unit * elements.sum(dim=-1).unsqueeze(-2) + 1e-3
    assert bool(((found - expected).abs() <= bound).all())
    assert float((found - expected).norm() / expected.norm()) < 0.01


def encoded(
    layers: int, kv_heads: int, head_dim: int, bits: int, device: torch.device, lengths: list[int]
) -> tuple[Tensor, Tensor, Sketch, SketchShape]:
    """Sequences that were loaded: the pool, the page table, the sketch, and its shape."""
    sketch, shape = random_sketch(layers, kv_heads, head_dim, bits, device)
    most = max(lengths) // PAGE + 1
    table = torch.randperm(len(lengths) * most).view(len(lengths), most).to(device, torch.int32)
    pool = torch.zeros(
        (table.numel(), layers, kv_heads, PAGE, shape.bytes), dtype=torch.uint8, device=device
    )
    for pages, length in zip(table, lengths, strict=True):
        tokens = torch.randn(2, layers, length, kv_heads, head_dim, device=device)
        if length:
            reference.load_codes(Shipment.of_one(tokens, pages.cpu()), pool, sketch, shape)
    return pool, table, sketch, shape


def assert_codes_agree(found: Tensor, expected: Tensor) -> None:
    """A key between two codes may get either, as float32 or float64 decide."""
    different = (found != expected).float().mean()
    assert different < 1e-4


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "bits", "dtype"),
    [
        (2, 64, 2, torch.float32),
        (1, 128, 4, torch.bfloat16),
        (3, 64, 1, torch.float16),
        (1, 32, 3, torch.float32),
    ],
)
def test_tokens_are_encoded_as_by_the_reference(
    kv_heads: int, head_dim: int, bits: int, dtype: torch.dtype, device: torch.device
) -> None:
    """In bulk, where a block ends and a page does, and one a row, in layers behind the first."""
    sketch, shape = random_sketch(3, kv_heads, head_dim, bits, device)
    pools = [
        torch.zeros((5, 3, kv_heads, PAGE, shape.bytes), dtype=torch.uint8, device=device)
        for _ in range(2)
    ]
    pages = torch.tensor([[3, 0, 4], [1, 2, 1]], dtype=torch.int32)
    both = [ShippedRow(1, 0, 4, 40), ShippedRow(0, 262, 0, 3)]  # and one of no row
    for width, rows in (
        (1, [ShippedRow(0, 0, 0, 1)]),
        (40, [ShippedRow(0, 1, 0, 40)]),
        (12, [ShippedRow(0, 250, 0, 12)]),
        (44, both),
    ):
        tokens = torch.randn(2, 3, width, kv_heads, head_dim, device=device).to(dtype)
        shipment = Shipment.of(tokens, pages[[row.slot for row in rows]], rows)
        for module, pool in zip((triton, reference), pools, strict=True):
            module.load_codes(shipment, pool, sketch, shape)
    assert_codes_agree(*pools)
    assert bool(pools[0][1].any())

    table = torch.tensor([[3, 0, 4], [1, 2, 1], [1, 2, 1]], dtype=torch.int32, device=device)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([261, 3, PAGE], dtype=torch.int32, device=device)
    rows = PagedRows(table, slots, positions)
    message = torch.randn(3, 2, 4 + 2 * kv_heads, head_dim, device=device).to(dtype)
    keys = message[:, :, 4 : 4 + kv_heads]
    for module, pool in zip((triton, reference), pools, strict=True):
        before = pool.clone()
        module.append_codes(keys, pool, sketch, shape, rows, 1)
        assert torch.equal(pool[:, 0], before[:, 0])  # of another layer
        assert int((pool != before).any(dim=-1).sum()) <= 2 * 2 * kv_heads
    assert_codes_agree(*pools)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "bits", "attends"),
    [
        (2, 3, 64, 1, None),
        (1, 8, 128, 4, None),
        (2, 2, 128, 3, None),
        (1, 4, 64, 2, (300, 0, 1)),
        (1, 1, 128, 4, (40, 4, 64)),
    ],
)
def test_scores_are_those_of_the_reference(
    kv_heads: int,
    group: int,
    head_dim: int,
    bits: int,
    attends: tuple[int, int, int] | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By normalizers of all tokens, or of those that are attended to: budget, sinks and recent."""
    monkeypatch.setattr(score_triton, "CHUNK_TOKENS", 256)  # several programs a row
    for name in ("LAUNCH_OF_ALL", "LAUNCH_OF_ATTENDED"):
        monkeypatch.setattr(triton, name, getattr(triton, name)._replace(chunk=256))
    lengths = [1, 300, PAGE, 3, 270]
    pool, table, sketch, shape = encoded(3, kv_heads, head_dim, bits, device, lengths)
    slots = torch.tensor([1, 0, 3, -1, 2], dtype=torch.int32, device=device)
    positions = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
    queries = torch.randn(5, 2, kv_heads * group, head_dim, device=device)
    attended = None
    if attends is not None:
        budget, sinks, recent = attends
        chosen = torch.full((4, 3, kv_heads, budget), -1, dtype=torch.int32)
        for slot, length in zip(slots.tolist(), lengths, strict=True):
            candidates = torch.arange(sinks, max(sinks, length - recent))
            for heads in chosen[slot].flatten(0, 1) if slot >= 0 else ():
                some = candidates[torch.randperm(len(candidates))][: budget - 7]
                heads[torch.randperm(budget)[: len(some)]] = some.to(torch.int32)
        attended = Attended(chosen.to(device), sinks, recent)
    outs = []
    for module, scoring in ((triton, score_triton), (reference, score_reference)):
        scores = scoring.score_workspace(5, 2, kv_heads, group, 768, device)
        workspace = reference.sketch_workspace(scores, 5, 2, kv_heads, group, shape)
        out = torch.full((5, 2, kv_heads, 768), 7.0, device=device)
        step = (1, head_dim**-0.5, workspace, out, attended)
        rows = PagedRows(table, slots, positions)
        module.score_sketch(queries, pool, sketch, shape, rows, *step)
        outs.append(out)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        used = length if slot >= 0 else 0
        found, expected = (out[row, ..., :used] for out in outs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
        assert bool((outs[0][row, ..., used:] == 7).all())
    assert bool((outs[1][3] == 7).all())


def test_a_normalizer_is_over_what_is_attended_to() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 2, 3, 20)
    chosen = torch.tensor([[[5, -1, 7], [9, 8, -1]]], dtype=torch.int32)
    found = attended_normalizer(logits, chosen, sinks=2, recent=3)
    for head, tokens in enumerate(([0, 1, 5, 7, 17, 18, 19], [0, 1, 8, 9, 17, 18, 19])):
        expected = logits[0, head][:, tokens].logsumexp(-1)
        torch.testing.assert_close(found[0, head, :, 0], expected)
    none = torch.full((1, 2, 3), -1, dtype=torch.int32)
    assert bool((attended_normalizer(logits, none, 0, 0) == 0).all())
    every = torch.arange(20, dtype=torch.int32).expand(1, 2, 20)
    torch.testing.assert_close(
        attended_normalizer(logits, every, 0, 0), logits.logsumexp(-1, keepdim=True)
    )
