"""Sketches in rows of a KV pool: both implementations write, score and pick the same."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from sketch_cases import keys_of, random_sketch
from torch import Tensor

from cache_rank.kernels.attend import reference as attend_reference
from cache_rank.kernels.attend import triton as attend_triton
from cache_rank.kernels.row_sketch import picking, reference, triton
from cache_rank.kernels.row_sketch.reference import KEY_UNIT, RowScratch
from cache_rank.kernels.sketch.reference import Sketch, SketchShape, query_weights, unpack_int2

UNTOUCHED = 7
SPARSE_FROM = 20
SINKS, RECENT, MOST = 3, 5, 40


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs score a request, and several blocks are in a chunk."""
    monkeypatch.setattr(triton, "LAUNCH", triton.LAUNCH._replace(block=128, chunk=256))
    monkeypatch.setattr(picking, "TOKENS", 128)


def sketch_of_a_layer(
    kv_heads: int, head_dim: int, bits: int, device: torch.device
) -> tuple[Sketch, SketchShape]:
    """The sketch of one of several layers, whose maps are those of no other head."""
    sketch, shape = random_sketch(3, kv_heads, head_dim, bits, device)
    return Sketch(*(part[1:2] for part in sketch)), shape


@pytest.mark.parametrize("count", [1, 65])
@pytest.mark.parametrize(
    ("sizes", "dtype", "index"),
    [
        ((2, 64, 1), torch.float16, torch.int32),
        ((1, 128, 2), torch.bfloat16, torch.int64),
        ((3, 64, 3), torch.float32, torch.int32),
        ((1, 256, 4), torch.bfloat16, torch.int64),
    ],
    ids=str,
)
def test_keys_are_encoded_into_their_rows(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    index: torch.dtype,
    count: int,
    device: torch.device,
) -> None:
    """Of so many KV heads, channels and bits."""
    (sketch, shape), (kv_heads, head_dim, _) = sketch_of_a_layer(*sizes, device), sizes
    projected = torch.randn(count, 2 * kv_heads + 3, head_dim, device=device).to(dtype)
    keys = projected[:, 3 : 3 + kv_heads]  # between queries and values
    rows = torch.randperm(100)[:count].to(device, index)
    found = torch.full((100, kv_heads, shape.bytes), UNTOUCHED, dtype=torch.uint8, device=device)
    expected = found.clone()
    triton.encode_rows(keys, rows, sketch, shape, found)
    reference.encode_rows(keys, rows, sketch, shape, expected)
    others = torch.ones(100, dtype=torch.bool, device=device).index_fill(0, rows.long(), False)
    assert bool((found[others] == UNTOUCHED).all())
    # A key between two codes may get either, as float32 or float64 decide.
    assert int((found != expected).sum()) <= 1e-4 * count * kv_heads * shape.bytes


class Step(NamedTuple):
    """What a decode step selects by: the arguments of `select_rows` up to the scale."""

    queries: Tensor
    codes: Tensor
    sketch: Sketch
    shape: SketchShape
    row_table: Tensor
    slots: Tensor
    lengths: Tensor
    sparse_from: Tensor
    budgets: Tensor
    scale: float


def decode_step(
    device: torch.device,
    lengths: list[int],
    budgets: list[int] | None = None,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    bits: int = 2,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
) -> tuple[Step, Tensor]:
    """Requests whose tokens lie in scattered rows, and the pool's keys, (rows, Hkv, D).

    Their budgets are MOST where none are given.
    """
    sketch, shape = sketch_of_a_layer(kv_heads, head_dim, bits, device)
    slot_count, context = len(lengths) + 2, max(lengths) + 5
    slots = torch.randperm(slot_count)[: len(lengths)]
    table = torch.randperm(slot_count * context).to(torch.int32).view(slot_count, context)
    # Random numbers of the CPU, so that all devices have the same.
    keys = torch.randn(table.numel(), kv_heads, head_dim).to(device)
    codes = torch.empty((len(keys), kv_heads, shape.bytes), dtype=torch.uint8, device=device)
    rows = torch.arange(len(keys), device=device)
    reference.encode_rows(keys, rows, sketch, shape, codes)
    projected = torch.randn(len(lengths), (group + 2) * kv_heads, head_dim).to(device)
    step = Step(
        projected.to(dtype)[:, : group * kv_heads],
        codes,
        sketch,
        shape,
        table.to(device),
        slots.to(device, index),
        torch.tensor(lengths, dtype=index, device=device),
        torch.full((slot_count,), SPARSE_FROM, dtype=torch.int32, device=device),
        torch.tensor(budgets or [MOST] * len(lengths), dtype=torch.int32, device=device),
        2 * head_dim**-0.5,
    )
    return step, keys


def selected(module: ModuleType, step: Step, capacity: int) -> tuple[Tensor, RowScratch]:
    """What a version of `select_rows` picks, (B, Hkv, attended), and its scratch."""
    requests, query_heads, _ = step.queries.shape
    kv_heads = step.codes.shape[1]
    size = (requests + 1, query_heads, kv_heads, capacity)  # one more than it takes
    scratch = module.row_scratch(*size, step.codes)
    scratch.keys.fill_(UNTOUCHED)
    picked = torch.full(
        (requests, kv_heads, SINKS + MOST + RECENT),
        -1,
        dtype=torch.int32,
        device=step.codes.device,
    )
    module.select_rows(*step, SINKS, RECENT, scratch, picked)
    return picked, scratch


def scored(step: Step, capacity: int) -> Tensor:
    """The keys by which Triton picks, (B, Hkv, capacity)."""
    requests, kv_heads = len(step.queries), step.codes.shape[1]
    keys = keys_of(selected(triton, step, capacity)[1].keys)[: requests * kv_heads, :capacity]
    return keys.unflatten(0, (requests, kv_heads))


def expected_keys(step: Step, request: int) -> Tensor:
    """The keys of a request's tokens by the reference, (Hkv, length - 1) int32."""
    queries = step.queries[request].float().unsqueeze(0)
    rows = step.row_table[step.slots[request], : int(step.lengths[request]) - 1].long()
    weights = query_weights(queries, step.sketch, step.scale)[0]
    return reference.score_rows(weights, step.codes[rows].transpose(0, 1)).int()


def rounding_of(step: Step) -> float:
    """How far keys may lie apart, as logits are rounded to float16, and weights to integers."""
    queries = step.queries.float()
    weights = query_weights(queries.unsqueeze(1), step.sketch, step.scale)[:, 0]
    logits = weights @ unpack_int2(step.codes.transpose(0, 1)).mT
    return float(logits.abs().max()) * KEY_UNIT * 2.0**-11 + 1


EDGES = (
    [300, SPARSE_FROM - 1, 256, SPARSE_FROM, 1, 257, 258, 600, 129, 128],
    [MOST, MOST, 7, MOST, 3, 0, MOST - 1, 1, MOST, 23],
)
"""Lengths around those of blocks, chunks and parts, with dense requests between; and budgets.

Budgets are all that is allowed, more than there is, nothing, and between.
"""

FEW = [258, SPARSE_FROM - 1, SPARSE_FROM, 129], [MOST, MOST, MOST, 7]


@pytest.mark.parametrize(
    ("requests", "shape"),
    [
        (EDGES, (1, 1, 64, 2, torch.float16, torch.int32)),
        (FEW, (2, 4, 128, 2, torch.bfloat16, torch.int64)),
        (FEW, (3, 3, 64, 1, torch.float32, torch.int64)),
        (FEW, (4, 2, 64, 2, torch.bfloat16, torch.int64)),
        (FEW, (4, 5, 64, 1, torch.float16, torch.int32)),
        (FEW, (1, 16, 64, 4, torch.bfloat16, torch.int32)),
        (FEW, (1, 8, 256, 2, torch.bfloat16, torch.int64)),
        (FEW, (1, 2, 128, 3, torch.float16, torch.int64)),
    ],
    ids=str,
)
def test_keys_and_picks_are_those_of_the_reference(
    requests: tuple[list[int], list[int]], shape: tuple[Any, ...], device: torch.device
) -> None:
    (lengths, budgets), kv_heads = requests, shape[0]
    step, _ = decode_step(device, lengths, budgets, *shape)
    picked, scratch = selected(triton, step, max(lengths))
    planes = scratch.keys[: len(lengths) * kv_heads].unflatten(0, (len(lengths), kv_heads))
    for request, length in enumerate(lengths):
        is_sparse = length >= SPARSE_FROM
        competing = length - RECENT if is_sparse else 0
        assert bool((planes[request, ..., 4 * -(-competing // 32) :] == UNTOUCHED).all())
        if not is_sparse:
            assert bool((picked[request] == -1).all())
            continue
        own = keys_of(planes[request])[:, :competing]
        expected = expected_keys(step, request)[:, :competing]
        assert int((own - expected).abs().max()) <= rounding_of(step)
        tokens = reference.pick(own.to(torch.uint8), length, SINKS, RECENT, budgets[request])
        attended = tokens.shape[1]
        assert attended == min(length, SINKS + budgets[request] + RECENT)
        rows = step.row_table[step.slots[request]][tokens]
        assert torch.equal(picked[request, :, :attended], rows)


def test_logits_may_be_large(device: torch.device) -> None:
    """Of several hundred nats: they are rounded to a sixteenth all the same."""
    step, _ = decode_step(device, [300], head_dim=128)
    step = step._replace(scale=100 * step.scale)
    own, expected = (
        keys[:, : 300 - RECENT] for keys in (scored(step, 300)[0], expected_keys(step, 0))
    )
    assert int((own - expected).abs().max()) <= rounding_of(step)
    assert int((expected > 0).sum()) > 0


def test_requests_are_sparse_by_the_length_of_their_slot(device: torch.device) -> None:
    step, _ = decode_step(device, [90, 90, 90])
    step.sparse_from[step.slots] = torch.tensor([90, 91, 5], dtype=torch.int32, device=device)
    is_scored = (selected(triton, step, 90)[0] != -1).flatten(1).all(dim=1)
    assert is_scored.tolist() == [True, False, True]


def test_queries_that_are_no_numbers_harm_no_others(device: torch.device) -> None:
    step, _ = decode_step(device, [90, 140])
    before = scored(step, 140)
    for value in (torch.inf, torch.nan):
        step.queries[0, 1, 5] = value
        after = scored(step, 140)
        assert torch.equal(after[1, :, : 140 - RECENT], before[1, :, : 140 - RECENT])
        assert torch.equal(after[0, 1, : 90 - RECENT], before[0, 1, : 90 - RECENT])


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize(
    ("kv_heads", "group", "dtype"), [(2, 4, torch.bfloat16), (1, 3, torch.float32)]
)
def test_a_decode_step_attends_to_what_it_would_by_the_references(
    kv_heads: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Tokens that are worth picking have keys beside which roundings are small."""
    attended = SINKS + MOST + RECENT
    lengths, budgets = [300, SPARSE_FROM - 1, 90, 56], [MOST, MOST, 17, MOST]
    step, keys = decode_step(device, lengths, budgets, kv_heads, group, dtype=dtype)
    step.sparse_from[step.slots[0]] = attended
    step.sparse_from[step.slots[2:]] = attended + 1
    # The queries of a KV head are alike, and the keys of as many tokens as are picked, too.
    step.queries.add_(2 * step.queries[:, ::group].repeat_interleave(group, dim=1))
    for request, length in enumerate(lengths):
        chosen = torch.randperm(max(0, length - SINKS - RECENT))[: budgets[request]] + SINKS
        rows = step.row_table[step.slots[request], chosen.to(device)].long()
        mean = step.queries[request].float().unflatten(0, (kv_heads, group)).mean(dim=1)
        keys[rows] = mean + 0.1 * torch.randn(len(rows), kv_heads, 64).to(device)
        triton.encode_rows(keys[rows], rows, step.sketch, step.shape, step.codes)
    for request, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        candidates = expected_keys(step, request)[:, SINKS : length - RECENT]
        best = candidates.sort(descending=True).values
        if length >= int(step.sparse_from[step.slots[request]]) and best.shape[-1] > budget:
            assert int((best[:, budget - 1] - best[:, budget]).min()) > 2 * rounding_of(step)
    values = torch.randn_like(keys)
    pool = [part.to(dtype) for part in (keys, values)]
    results = []
    for selecting, attending in ((triton, attend_triton), (reference, attend_reference)):
        picked, _ = selected(selecting, step, 300)
        out = torch.empty(step.queries.shape, dtype=dtype, device=device)
        requests = *step[4:9], SINKS + RECENT
        attending.attend_rows(step.queries, *pool, picked, *requests, 64**-0.5, out)
        results.append((picked, out))
    (found_rows, found), (expected_rows, expected) = results
    assert torch.equal(found_rows, expected_rows)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
