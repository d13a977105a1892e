"""Sketches in rows of a KV pool: both implementations write, score and pick the same."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cache_rank.kernels.attend import reference as attend_reference
from cache_rank.kernels.attend import triton as attend_triton
from cache_rank.kernels.pick import reference as pick_reference
from cache_rank.kernels.pick import triton as pick_triton
from cache_rank.kernels.pick.reference import KEY_UNIT
from cache_rank.kernels.row_sketch import reference, triton
from cache_rank.kernels.sketch.reference import (
    Sketch,
    SketchShape,
    make_sketch,
    query_weights,
    sketch_shape,
    unpack_int2,
)

UNTOUCHED = 7
SPARSE_FROM = 20


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs score a request, and several blocks are in a chunk."""
    monkeypatch.setattr(triton, "LAUNCH", triton.LAUNCH._replace(block=128, chunk=256))
    monkeypatch.setattr(triton, "_FINISHED_LOGITS", 512)


def sketch_of_a_layer(
    kv_heads: int, head_dim: int, bits: int, device: torch.device
) -> tuple[Sketch, SketchShape]:
    """The sketch of one of several layers, whose maps are those of no other head."""
    torch.manual_seed(0)
    basis = torch.eye(head_dim) + 0.05 * torch.randn(3, kv_heads, head_dim, head_dim)
    mean = torch.randn(3, kv_heads, head_dim)
    shape = sketch_shape(head_dim, bits)
    return Sketch(*(part[1:2].to(device) for part in make_sketch(basis, mean, shape))), shape


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 33, 200])
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "bits", "dtype"),
    [
        (2, 64, 1, torch.float16),
        (1, 128, 2, torch.bfloat16),
        (3, 64, 3, torch.float32),
        (2, 256, 4, torch.bfloat16),
    ],
)
def test_keys_are_encoded_into_their_rows(
    kv_heads: int,
    head_dim: int,
    bits: int,
    dtype: torch.dtype,
    count: int,
    index: torch.dtype,
    device: torch.device,
) -> None:
    sketch, shape = sketch_of_a_layer(kv_heads, head_dim, bits, device)
    projected = torch.randn(count, 2 * kv_heads + 3, head_dim, device=device).to(dtype)
    keys = projected[:, 3 : 3 + kv_heads]  # between queries and values
    rows = torch.randperm(300)[:count].to(device, index)
    found = torch.full((kv_heads, 300, shape.bytes), UNTOUCHED, dtype=torch.uint8, device=device)
    expected = found.clone()
    triton.encode_rows(keys, rows, sketch, shape, found)
    reference.encode_rows(keys, rows, sketch, shape, expected)
    others = torch.ones(300, dtype=torch.bool, device=device).index_fill(0, rows.long(), False)
    assert bool((found[:, others] == UNTOUCHED).all())
    # A key between two codes may get either, as float32 or float64 decide.
    assert int((found != expected).sum()) <= 1e-4 * count * kv_heads * shape.bytes


class Step(NamedTuple):
    """What a decode step scores: the arguments of `score_rows` before the scratch."""

    queries: Tensor
    codes: Tensor
    sketch: Sketch
    shape: SketchShape
    row_table: Tensor
    slots: Tensor
    lengths: Tensor
    sparse_from: Tensor
    scale: float


def decode_step(
    lengths: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    bits: int,
    dtype: torch.dtype,
    index: torch.dtype,
    device: torch.device,
) -> tuple[Step, Tensor]:
    """Requests whose tokens lie in scattered rows, and the pool's keys, (rows, Hkv, D)."""
    sketch, shape = sketch_of_a_layer(kv_heads, head_dim, bits, device)
    slot_count, context = len(lengths) + 2, max(lengths) + 5
    slots = torch.randperm(slot_count)[: len(lengths)]
    table = torch.randperm(slot_count * context).to(torch.int32).view(slot_count, context)
    keys = torch.randn(table.numel(), kv_heads, head_dim, device=device)
    codes = torch.empty((kv_heads, len(keys), shape.bytes), dtype=torch.uint8, device=device)
    rows = torch.arange(len(keys), device=device)
    reference.encode_rows(keys, rows, sketch, shape, codes)
    projected = torch.randn(len(lengths), (group + 2) * kv_heads, head_dim, device=device)
    step = Step(
        projected.to(dtype)[:, : group * kv_heads],
        codes,
        sketch,
        shape,
        table.to(device),
        slots.to(device, index),
        torch.tensor(lengths, dtype=index, device=device),
        torch.full((slot_count,), SPARSE_FROM, dtype=torch.int32, device=device),
        2 * head_dim**-0.5,
    )
    return step, keys


def scored(module: ModuleType, step: Step, capacity: int) -> Tensor:
    """The keys that a version of `score_rows` writes, (B, Hkv, capacity) int32."""
    requests, query_heads, _ = step.queries.shape
    kv_heads = len(step.codes)
    size = (requests + 1, query_heads, kv_heads, capacity + 300)  # more than it takes
    scratch = module.row_scratch(*size, step.codes)
    out = torch.full(
        (requests, kv_heads, capacity), UNTOUCHED, dtype=torch.int32, device=step.codes.device
    ).to(torch.uint16)
    module.score_rows(*step, scratch, out)
    return out.to(torch.int32)


def rounding_of(step: Step) -> float:
    """How far keys may lie apart, as logits are rounded to float16, and weights to integers."""
    queries = step.queries.float()
    weights = query_weights(queries.unsqueeze(1), step.sketch, step.scale)[:, 0]
    logits = weights @ unpack_int2(step.codes).mT
    return float(logits.abs().max()) * KEY_UNIT * 2.0**-11 + 6


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "bits", "dtype", "index"),
    [
        (2, 4, 128, 2, torch.bfloat16, torch.int64),
        (1, 1, 64, 2, torch.float16, torch.int32),
        (3, 3, 64, 1, torch.float32, torch.int64),
        (2, 16, 64, 4, torch.bfloat16, torch.int32),
        (1, 8, 256, 2, torch.bfloat16, torch.int64),
        (2, 2, 128, 3, torch.float16, torch.int64),
    ],
)
def test_scores_are_those_of_the_reference(
    kv_heads: int,
    group: int,
    head_dim: int,
    bits: int,
    dtype: torch.dtype,
    index: torch.dtype,
    device: torch.device,
) -> None:
    """Of lengths around those of blocks and chunks, and with dense requests between sparse ones."""
    lengths = [300, SPARSE_FROM - 1, 256, SPARSE_FROM, 1, 257, 600, 128]
    step, _ = decode_step(lengths, kv_heads, group, head_dim, bits, dtype, index, device)
    found, expected = (scored(module, step, 777) for module in (triton, reference))
    assert bool((expected[0, :, :300] != UNTOUCHED).all())
    for request, length in enumerate(lengths):
        written = length if length >= SPARSE_FROM else 0
        assert bool((found[request, :, written:] == UNTOUCHED).all())
    assert int((found - expected).abs().max()) <= rounding_of(step)


def test_requests_are_sparse_by_the_length_of_their_slot(device: torch.device) -> None:
    step, _ = decode_step([90, 90, 90], 2, 2, 64, 2, torch.float32, torch.int64, device)
    step.sparse_from[step.slots] = torch.tensor([90, 91, 5], dtype=torch.int32, device=device)
    is_scored = (scored(triton, step, 90) != UNTOUCHED).flatten(1).all(dim=1)
    assert is_scored.tolist() == [True, False, True]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_queries_that_are_no_numbers_harm_no_others(value: float, device: torch.device) -> None:
    step, _ = decode_step([90, 300], 2, 2, 64, 2, torch.float32, torch.int64, device)
    before = scored(triton, step, 300)
    step.queries[0, 1, 5] = value
    after = scored(triton, step, 300)
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[0, 1], before[0, 1])


@pytest.mark.parametrize(("kv_heads", "group", "dtype"), [(2, 4, torch.bfloat16), (1, 3, None)])
def test_a_decode_step_attends_to_what_it_would_by_the_references(
    kv_heads: int, group: int, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Tokens that are worth picking have keys beside which roundings are small."""
    dtype = dtype or torch.float32
    head_dim, sinks, recent, budget = 64, 3, 5, 40
    lengths = [700, SPARSE_FROM - 1, 300, 56]
    step, keys = decode_step(lengths, kv_heads, group, head_dim, 2, dtype, torch.int64, device)
    step.sparse_from[step.slots[0]] = sinks + budget + recent
    step.sparse_from[step.slots[2:]] = sinks + budget + recent + 1
    width = sinks + budget + recent
    # The keys of as many tokens as are picked are along the mean of their head's queries.
    for request, length in enumerate(lengths):
        slot = int(step.slots[request])
        chosen = torch.randperm(max(0, length - sinks - recent))[:budget].to(device) + sinks
        rows = step.row_table[slot, chosen].long()
        mean = step.queries[request].float().unflatten(0, (kv_heads, group)).mean(dim=1)
        keys[rows] = 3 * mean * group**0.5 + 0.1 * torch.randn_like(keys[rows])
    every = torch.arange(len(keys), device=device)
    triton.encode_rows(keys, every, step.sketch, step.shape, step.codes)
    scores = scored(reference, step, 705)
    for request, length in enumerate(lengths):
        best = scores[request, :, sinks : length - recent].sort(descending=True).values
        if length >= int(step.sparse_from[step.slots[request]]) and best.shape[-1] > budget:
            assert int((best[:, budget - 1] - best[:, budget]).min()) > 2 * rounding_of(step)
    values = torch.randn_like(keys)
    pool = [part.to(dtype) for part in (keys, values)]
    results = []
    for sketching, picking, attending in (
        (triton, pick_triton, attend_triton),
        (reference, pick_reference, attend_reference),
    ):
        scores = scored(sketching, step, 705).to(torch.uint16)
        picked = torch.zeros((len(lengths), kv_heads, width), dtype=torch.int32, device=device)
        table = step[4:8]
        picking.pick_tokens(scores, *table, sinks, recent, picked)
        out = torch.empty(step.queries.shape, dtype=dtype, device=device)
        attending.attend_rows(step.queries, *pool, picked, *table, head_dim**-0.5, out)
        results.append((picked, out))
    (found_rows, found), (expected_rows, expected) = results
    assert torch.equal(found_rows, expected_rows)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
