"""Attention over codes: the reference against decoding first, Triton against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from coded_cases import (
    FORMATS,
    KV_HEADS,
    NARROW,
    Format,
    empty,
    hack,
    largest,
    load,
    on,
    random_shipment,
)
from torch import Tensor

from cache_rank.kernels.attend.reference import merge_parts
from cache_rank.kernels.coded import reference, triton
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.hack.reference import HackCodec, decode_keys, encode_queries
from cache_rank.kernels.quantspec.reference import QuantSpecCodec
from cache_rank.kernels.rows import PagedRows

RESIDENT = (300, 0, 100, 640, 512)
"""Codes and newest tokens, none, few newest ones, and codes of several pages with and without."""
LAYER = 1


class Held(NamedTuple):
    """Sequences that are held, and the rows of a step on them."""

    tokens: CodedTokens
    rows: PagedRows


def of(name: str, count: int = 1) -> Format:
    """A format, with a ring that has the newest tokens of so many queries."""
    held_as = FORMATS[name]
    if count > 1 and held_as.ring == held_as.group_tokens:
        held_as = replace(held_as, ring=2 * held_as.group_tokens)
    return held_as


def held(
    held_as: Format,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
) -> Held:
    """RESIDENT tokens, in other slots than their rows, and a row that is refused."""
    tokens = empty(held_as, device, dtype, pages=16, layers=2, head_dim=head_dim)
    tokens = tokens._replace(
        rings=tuple(ring.repeat(2, 1, 1, 1, 1) for ring in tokens.rings)  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(15, generator=generator).view(5, 3).to(device, torch.int32)
    slots = on(device, 3, 0, 1, 6, 4)
    for row, count in enumerate(RESIDENT):
        if count:
            shipment = random_shipment(tokens, count, seed=row)
            load(tokens, table[row], int(slots[row]), 0, shipment)
    rows = PagedRows(
        torch.cat((table, table[:1])),
        torch.cat((slots, on(device, -1))),
        on(device, *(count - 1 for count in (*RESIDENT, 300))),
    )
    values = tokens.codecs[1]
    if isinstance(values, QuantSpecCodec):  # both planes of values are read where those of keys are
        keys = tokens.codecs[0]
        assert isinstance(keys, QuantSpecCodec)
        tokens = tokens._replace(codecs=(keys, values._replace(read_bits=keys.read_bits)))
    return Held(tokens, rows)


def random_queries(held: Held, count: int, group: int) -> Tensor:
    shape = (len(held.rows.slots), count, KV_HEADS * group, held.tokens.rings[0].shape[-1])
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return queries.to(held.tokens.rings[0].device)


def attended(
    implementation: Any, held: Held, queries: Tensor, newest: bool = True
) -> tuple[Tensor, Tensor]:
    scale = queries.shape[-1] ** -0.5
    out, log_sums = implementation.attend_codes(
        held.tokens, queries, held.rows, LAYER, scale, newest
    )
    assert out.shape == queries.shape
    assert log_sums.shape == queries.shape[:3]
    assert out.dtype == log_sums.dtype == torch.float32
    return out, log_sums


def decoded(held: Held, row: int, resident: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a row's tokens, (Hkv, n, D) float64, decoded as attention reads them."""
    tokens, rows = held
    found = []
    for codec, planes, ring in zip(tokens.codecs, tokens.planes, tokens.rings, strict=True):
        parts = []
        for position in range(resident):
            if position >= tokens.coded(resident):
                slot = int(rows.slots[row])
                parts.append(ring[slot, LAYER, :, position % ring.shape[3]].double())
                continue
            page = int(rows.page_table[row, position // tokens.page_tokens])
            entry = position % tokens.page_tokens
            entries = [
                plane[page, LAYER, :, entry * plane.shape[3] // tokens.page_tokens]
                for plane in planes
            ]
            if isinstance(codec, QuantSpecCodec) and codec.read_bits == 4:
                entries[1] = torch.zeros_like(entries[1])
            parts.append(codec.decode(entries).double())
        found.append(torch.stack(parts, dim=1))
    return found[0], found[1]


def plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, stops: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and log-sum-exps of queries, (Q, Hq, D), that see [0, stop) each; and weights."""
    outputs, log_sums, weights = [], [], []
    group = queries.shape[1] // keys.shape[0]
    for query, stop in zip(queries.double(), stops, strict=True):
        key, value = (part[:, :stop].repeat_interleave(group, dim=0) for part in (keys, values))
        logits = (key @ query.unsqueeze(-1)).squeeze(-1) * queries.shape[-1] ** -0.5
        weights.append(logits.softmax(-1))
        outputs.append((weights[-1].unsqueeze(1) @ value).squeeze(1))
        log_sums.append(logits.logsumexp(-1))
    return torch.stack(outputs), torch.stack(log_sums), weights[-1]


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", ["quantspec 4", "quantspec 8"])
def test_quantspec_is_attention_to_decoded_tokens(
    device: torch.device, name: str, count: int
) -> None:
    """Each query sees all codes, and newest tokens up to its own."""
    sequences = held(of(name), device)
    queries = random_queries(sequences, count, 2)
    for newest in (True, False):
        out, log_sums = attended(reference, sequences, queries, newest)
        for row, resident in enumerate(RESIDENT):
            if not newest:
                resident = sequences.tokens.coded(resident)
            if resident == 0:
                assert (out[row] == 0).all()
                assert (log_sums[row] == -torch.inf).all()
                continue
            keys, values = decoded(sequences, row, RESIDENT[row])
            stops = [resident - (count - 1 - index) * newest for index in range(count)]
            expected = plain_attention(queries[row], keys, values, stops)
            torch.testing.assert_close(out[row].double(), expected[0], atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(log_sums[row].double(), expected[1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["hack 4, sums", "hack 4, 16", "hack 2"])
def test_hack_is_attention_to_decoded_tokens_but_for_8_bit_queries_and_weights(
    device: torch.device, name: str
) -> None:
    """A weight is off by half a step of its partition, which is 1/255 of the range of weights."""
    sequences = held(of(name), device)
    codec = sequences.tokens.codecs[1]
    assert isinstance(codec, HackCodec)
    queries = random_queries(sequences, 1, 2)
    rounded = decode_keys(encode_queries(queries, codec.partition), 8, codec.partition)
    out, log_sums = attended(reference, sequences, queries)
    for row, resident in enumerate(RESIDENT):
        if resident == 0:
            continue
        keys, values = decoded(sequences, row, resident)
        coded = sequences.tokens.coded(resident)
        of_codes = plain_attention(rounded[row], keys[:, :coded], values[:, :coded], [coded])
        of_newest = plain_attention(queries[row], keys[:, coded:], values[:, coded:], [999])
        parts = [part for part in (of_codes, of_newest) if part[1].isfinite().all()]
        expected = merge_parts(*(torch.stack(part) for part in list(zip(*parts, strict=True))[:2]))
        torch.testing.assert_close(log_sums[row].double(), expected[1], atol=1e-4, rtol=1e-5)
        allowed = torch.full_like(expected[0], 1e-4)
        if coded:
            weights = of_codes[2].unflatten(-1, (-1, codec.partition))  # (Hq, Z, Π)
            ranges = weights.amax(-1) - weights.amin(-1)
            sizes = values[:, :coded].abs().unflatten(1, (-1, codec.partition)).sum(2)
            sizes = sizes.repeat_interleave(2, dim=0)  # (Hq, Z, D)
            allowed += (0.51 / 255 * ranges.unsqueeze(1) @ sizes).squeeze(1)
            assert allowed.median() < 0.2
        error = (out[row] - expected[0]).abs()
        assert (error <= allowed).all()
        if coded:
            assert error.max() > 1e-4  # weights were rounded


def test_parts_merge_to_the_whole(device: torch.device) -> None:
    """Codes, and newest tokens that the caller attends to, are all tokens."""
    sequences = held(of("quantspec 8"), device)
    queries = random_queries(sequences, 1, 2)
    out, log_sums = attended(reference, sequences, queries)
    of_codes = attended(reference, sequences, queries, newest=False)
    for row, resident in enumerate(RESIDENT):
        if resident == 0:
            continue
        coded = sequences.tokens.coded(resident)
        keys, values = decoded(sequences, row, resident)
        rest = plain_attention(queries[row], keys[:, coded:], values[:, coded:], [999])
        merged = merge_parts(
            torch.stack((of_codes[0][row].double(), rest[0])),
            torch.stack((of_codes[1][row].double(), rest[1])),
        )
        torch.testing.assert_close(merged[0], out[row].double(), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(merged[1], log_sums[row].double(), atol=1e-4, rtol=1e-5)
    nothing = torch.full((2, 3), -torch.inf)
    assert (merge_parts(torch.zeros(2, 3, 4), nothing)[0] == 0).all()


@pytest.fixture
def few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes its time for each program."""
    if device.type == "cpu":
        monkeypatch.setattr(triton, "_MOST_SPLITS", 3)


def assert_same(sequences: Held, queries: Tensor, newest: bool = True) -> None:
    """Triton does as the reference, but for what it rounds.

    For QuantSpec that is queries times steps, and weights times steps, by 2^-11 each. For HACK it
    is float32, but then the code of a weight may be the next: a step for a token, now and then.
    """
    out, log_sums = attended(triton, sequences, queries, newest)
    expected, expected_sums = attended(reference, sequences, queries, newest)
    some = expected_sums.isfinite()
    assert torch.equal(log_sums.isfinite(), some)
    assert (out[~some] == 0).all()
    ring = sequences.tokens.rings[0]
    of_ring = 0.1 if ring.is_cuda and ring.dtype == torch.bfloat16 else 0.0
    exact = not isinstance(sequences.tokens.codecs[0], QuantSpecCodec)
    torch.testing.assert_close(log_sums, expected_sums, atol=1e-4 if exact else 5e-3, rtol=0)
    error = (out - expected).abs().amax(-1)[some]
    if exact:
        step = largest(sequences.tokens.planes[1][2]) * 15 + 20  # the values of a token at most
        assert error.max() <= 3 / 255 * step + of_ring
        assert error.quantile(0.5) <= 1e-3 + of_ring
    else:
        assert error.max() <= 0.05 + of_ring
        assert error.quantile(0.5) <= 0.01 + of_ring


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("name", "group", "count", "head_dim", "dtype", "newest"),
    [
        ("quantspec 4", 1, 1, 64, torch.float32, True),
        ("quantspec 4", 4, 1, 128, NARROW, True),
        ("quantspec 4", 8, 1, 64, torch.float16, False),
        ("quantspec 8", 4, 1, 64, torch.float32, False),
        ("quantspec 8", 1, 5, 128, torch.float32, True),
        ("quantspec 8", 4, 5, 64, NARROW, True),
        ("quantspec 8", 8, 5, 64, torch.float16, False),
        ("quantspec 4", 3, 5, 64, torch.float32, True),
        ("hack 4, sums", 1, 1, 128, torch.float32, True),
        ("hack 4, sums", 4, 1, 128, NARROW, True),
        ("hack 4, sums", 8, 1, 64, torch.float16, False),
        ("hack 4, sums", 4, 5, 64, torch.float32, True),
        ("hack 4", 8, 5, 64, NARROW, False),
        ("hack 4, 16", 4, 1, 64, torch.float32, True),
        ("hack 2", 4, 1, 128, torch.float32, True),
        ("hack 2, 32", 1, 5, 128, torch.float32, True),
        ("hack 2, 16, sums", 3, 1, 128, torch.float16, True),
    ],
    ids=str,
)
def test_triton_attends_as_the_reference_but_for_rounding(
    device: torch.device,
    name: str,
    group: int,
    count: int,
    head_dim: int,
    dtype: torch.dtype,
    newest: bool,
) -> None:
    """Of ragged rows, an empty one and a refused one."""
    sequences = held(of(name, count), device, dtype, head_dim)
    queries = random_queries(sequences, count, group).to(dtype)
    queries[0, 0, 0] = 0.5  # no range to encode
    assert_same(sequences, queries, newest)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", ["quantspec 4", "quantspec 8", "hack 4, sums"])
def test_values_of_any_size(device: torch.device, name: str) -> None:
    """Of which some tokens' are larger by far, and some all the same."""
    sequences = held(of(name), device)
    scales = sequences.tokens.planes[1][2]
    queries = random_queries(sequences, 1, 4)
    for position, factor in ((0, 0.0), (1, 1e-30), (2, 1e-3)):
        scales.narrow(3, position, 1).mul_(factor)
    assert_same(sequences, queries)
    by_size = []
    for _ in range(2):
        by_size.append(attended(triton, sequences, queries, newest=False)[0])
        for plane in sequences.tokens.planes[1]:
            if plane.is_floating_point():
                plane.mul_(2.0**40)
    expected = by_size[0] * 2.0**40
    assert (by_size[1] - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("bits", "partition"), [(4, 64), (2, 16)])
def test_sums_of_values_are_the_same_stored_or_not(
    device: torch.device, bits: int, partition: int
) -> None:
    stored, computed = (
        held(hack(bits, partition, value_sums=is_stored), device) for is_stored in (True, False)
    )
    queries = random_queries(stored, 1, 2)
    for one, other in zip(
        attended(triton, stored, queries), attended(triton, computed, queries), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("group", "count"), [(4, 1), (1, 1), (8, 1), (4, 5), (2, 8)])
@pytest.mark.parametrize("name", ["quantspec 4", "quantspec 8", "hack 4, sums", "hack 2"])
def test_triton_at_full_size(name: str, group: int, count: int, head_dim: int) -> None:
    """20001 and 777 tokens in bfloat16, read through page tables of random pages."""
    device, kv_heads = torch.device("cuda"), 8
    shape = {"pages": 90, "layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
    tokens = empty(of(name, count), device, torch.bfloat16, **shape)
    generator = torch.Generator(device).manual_seed(0)
    pages = torch.randperm(90, generator=generator, device=device).to(torch.int32)
    table = torch.stack((pages[:80], pages[-80:]))
    table[1, :10] = pages[80:]
    for row, resident in enumerate((20001, 777)):
        load(tokens, table[row], row, 0, random_shipment(tokens, resident, seed=row))
    rows = PagedRows(table, on(device, 0, 1), on(device, 20000, 776))
    queries = torch.randn(
        (2, count, kv_heads * group, head_dim), generator=generator, device=device
    )
    assert_same(Held(tokens, rows), queries.bfloat16())
