"""Attention over codes: the reference against decoding first, Triton against the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from coded_cases import ATTENDED, KV_HEADS, NARROW, empty, hack, largest, load, on, random_shipment
from torch import Tensor
from torch.nn.functional import pad

from cache_rank.kernels.coded import attending, reference, triton
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.hack.reference import (
    HackCodec,
    decode,
    encode_keys,
    encode_queries,
    encode_values,
)
from cache_rank.kernels.quantspec.reference import QuantSpecCodec
from cache_rank.kernels.rows import PagedRows

RESIDENT = (300, 0, 100, 520, 30)
"""Codes of several pages, or none, as 100 tokens have of groups of 128, and 30 of any."""
REFUSED = len(RESIDENT)
"""The row that is refused."""
LAYER = 1


class Held(NamedTuple):
    """Sequences that are held, and the rows of a step on them."""

    tokens: CodedTokens
    rows: PagedRows

    def coded(self, row: int) -> int:
        """How many tokens of a row are codes."""
        return self.tokens.coded(int(self.rows.positions[row]) + 1)


def held(
    name: str, device: torch.device, dtype: torch.dtype = torch.float32, head_dim: int = 64
) -> Held:
    """RESIDENT tokens, in pages without order; and a row that is refused."""
    tokens = empty(name, device, dtype, pages=15, head_dim=head_dim)
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(15, generator=generator).view(-1, 3).to(device, torch.int32)
    for row, count in enumerate(RESIDENT):
        if count:
            load(tokens, table[row], row, 0, random_shipment(tokens, count, seed=row))
    slots = on(device, *range(REFUSED), -1)
    positions = on(device, *(count - 1 for count in (*RESIDENT, 300)))
    return Held(tokens, PagedRows(torch.cat((table, table[:1])), slots, positions))


def random_queries(held: Held, count: int, group: int) -> Tensor:
    shape = (len(held.rows.slots), count, KV_HEADS * group, held.tokens.rings[0].shape[-1])
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return queries.to(held.tokens.rings[0].device)


def attended(implementation: Any, held: Held, queries: Tensor) -> tuple[Tensor, Tensor]:
    scale = queries.shape[-1] ** -0.5
    out, log_sums = implementation.attend_codes(held.tokens, queries, held.rows, LAYER, scale)
    assert out.shape == queries.shape
    assert log_sums.shape == queries.shape[:3]
    assert out.dtype == log_sums.dtype == torch.float32
    return out, log_sums


def decoded(held: Held, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the codes of a row, (Hkv, n, D) float64, token by token."""
    tokens, rows = held
    found = []
    for codec, planes in zip(tokens.codecs, tokens.planes, strict=True):
        parts = []
        for position in range(held.coded(row)):
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


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and log-sum-exps of queries, (Q, Hq, D), and their weights."""
    group = queries.shape[1] // keys.shape[0]
    keys, values = (part.repeat_interleave(group, dim=0) for part in (keys, values))
    logits = torch.einsum("qhd,hnd->qhn", queries.double(), keys) * queries.shape[-1] ** -0.5
    weights = logits.softmax(-1)
    return torch.einsum("qhn,hnd->qhd", weights, values), logits.logsumexp(-1), weights


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", ["quantspec 4, values too", "quantspec 8"])
def test_quantspec_is_attention_to_decoded_tokens(
    device: torch.device, name: str, count: int
) -> None:
    sequences = held(name, device)
    queries = random_queries(sequences, count, 2)
    out, log_sums = attended(reference, sequences, queries)
    for row in range(REFUSED + 1):
        if sequences.coded(row) == 0 or row == REFUSED:
            assert (out[row] == 0).all()
            assert (log_sums[row] == -torch.inf).all()
            continue
        expected = plain_attention(queries[row], *decoded(sequences, row))
        torch.testing.assert_close(out[row].double(), expected[0], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(log_sums[row].double(), expected[1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["hack 4, sums", "hack 4, 16", "hack 2", "hack 4, unfinished", "hack 2, unfinished"],
)
def test_hack_is_attention_to_decoded_tokens_but_for_8_bit_queries_and_weights(
    device: torch.device, name: str
) -> None:
    """A weight is off by half a step of its partition, which is 1/255 of the range of weights."""
    sequences = held(name, device)
    codec = sequences.tokens.codecs[1]
    assert isinstance(codec, HackCodec)
    queries = random_queries(sequences, 3, 2)
    rounded = decode(encode_queries(queries, codec.partition), 8, codec.partition)
    out, log_sums = attended(reference, sequences, queries)
    for row in [0, 2, 3] + [4] * sequences.tokens.unfinished:
        keys, values = decoded(sequences, row)
        expected, expected_sums, weights = plain_attention(rounded[row], keys, values)
        torch.testing.assert_close(log_sums[row].double(), expected_sums, atol=1e-4, rtol=1e-5)
        lacking = -keys.shape[1] % codec.partition
        weights, values = pad(weights, (0, lacking)), pad(values, (0, 0, 0, lacking))
        of_partitions = weights.unflatten(-1, (-1, codec.partition))  # (Q, Hq, Z, Π)
        ranges = of_partitions.amax(-1) - of_partitions.amin(-1)
        sizes = values.abs().unflatten(1, (-1, codec.partition)).sum(2)
        sizes = sizes.repeat_interleave(2, dim=0)  # (Hq, Z, D)
        allowed = 0.5 / 255 * torch.einsum("qhz,hzd->qhd", ranges, sizes) + 1e-4
        error = (out[row] - expected).abs()
        assert (error <= allowed).all()
        assert error.max() > 1e-3  # weights were rounded


@pytest.mark.parametrize("name", ["hack 4, unfinished", "hack 2, unfinished"])
def test_unfinished_groups_are_encoded_as_if_they_had_no_more_tokens(
    device: torch.device, name: str
) -> None:
    sequences = held(name, device)
    tokens = sequences.tokens
    for row, newer in ((0, 300 % 64), (2, 100 % 64), (4, 30)):
        found = decoded(sequences, row)
        for codec, ring, part in zip(tokens.codecs, tokens.rings, found, strict=True):
            assert isinstance(codec, HackCodec)
            encode = encode_keys if codec.of_keys else encode_values
            codes = encode(ring[row, LAYER, :, :newer], codec.bits, codec.partition)
            expected = decode(codes, codec.bits, codec.partition)
            assert torch.equal(part[:, -newer:].float(), expected)


@pytest.fixture
def few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes its time for each program."""
    if device.type == "cpu":
        monkeypatch.setattr(attending, "_MOST_SPLITS", 3)


def assert_same(sequences: Held, queries: Tensor) -> None:
    """Triton does as the reference, but for what it rounds.

    For QuantSpec that is queries times steps, and weights times steps, by 2^-11 each; for Lynx also
    keys and values, so that logits are off by some 2^-10 of them. For HACK it is float32, but then
    the code of a weight may be the next: a step for a token, now and then.
    """
    out, log_sums = attended(triton, sequences, queries)
    expected, expected_sums = attended(reference, sequences, queries)
    some = expected_sums.isfinite()
    assert some.any()
    assert torch.equal(log_sums.isfinite(), some)
    assert (out[~some] == 0).all()
    error = (out - expected).abs().amax(-1)[some]
    if not isinstance(sequences.tokens.codecs[0], HackCodec):
        torch.testing.assert_close(log_sums, expected_sums, atol=5e-3, rtol=2**-10)
        assert error.max() <= 0.05
        assert error.median() <= 0.01
    else:
        torch.testing.assert_close(log_sums, expected_sums, atol=1e-4, rtol=0)
        of_a_token = largest(sequences.tokens.planes[1][2]) * 15 + 20  # its values at most
        assert error.max() <= 3 / 255 * of_a_token
        assert error.median() <= 1e-3


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("name", "group", "count", "head_dim", "dtype"),
    [
        ("quantspec 4, values too", 4, 1, 128, NARROW),
        ("quantspec 4, values too", 3, 5, 64, torch.float32),
        ("quantspec 8", 8, 1, 64, torch.float16),
        ("quantspec 8", 4, 9, 128, NARROW),
        ("quantspec 8", 3, 3, 256, torch.float32),  # more queries than a launch takes
        ("lynx full", 4, 1, 128, NARROW),
        ("lynx anchor", 4, 1, 64, torch.float32),
        ("lynx full", 3, 5, 64, torch.float16),
        ("lynx anchor, large alpha", 8, 17, 64, torch.float32),  # so have these
        ("lynx full", 3, 3, 256, torch.float32),
        ("hack 4, sums", 1, 1, 128, torch.float32),
        ("hack 4, keys by 16", 4, 1, 64, torch.float32),
        ("hack 2, sums", 1, 5, 64, NARROW),
        ("hack 4, unfinished", 4, 1, 128, torch.float32),
        ("hack 2, unfinished", 1, 5, 64, NARROW),
    ],
    ids=str,
)
def test_triton_attends_as_the_reference_but_for_rounding(
    device: torch.device, name: str, group: int, count: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Of ragged rows, an empty one and a refused one."""
    sequences = held(name, device, dtype, head_dim)
    if not isinstance(sequences.tokens.codecs[0], HackCodec):  # others have no codes of so few
        kept = [0, 1, 3, REFUSED]
        sequences = sequences._replace(rows=PagedRows(*(part[kept] for part in sequences.rows)))
    queries = random_queries(sequences, count, group).to(dtype)
    queries[0, 0, 0] = 0.5  # no range to encode
    assert_same(sequences, queries)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("name", ["quantspec 4, values too", "quantspec 8"])
def test_values_of_any_size_are_attended_to_alike(
    device: torch.device, name: str, count: int
) -> None:
    """Tiny ones, and those beyond the range of float16."""
    sequences = held(name, device)
    kept = [0, 3]
    sequences = sequences._replace(rows=PagedRows(*(part[kept] for part in sequences.rows)))
    queries = random_queries(sequences, count, 4)
    expected, expected_sums = attended(triton, sequences, queries)
    for size in (2.0**-30, 2.0**20):
        for relative_to in sequences.tokens.planes[1][2:]:
            relative_to *= size
        out, log_sums = attended(triton, sequences, queries)
        for relative_to in sequences.tokens.planes[1][2:]:
            relative_to /= size
        torch.testing.assert_close(out / size, expected, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(log_sums, expected_sums, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("implementation", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("name", "bits", "partition"), [("hack 4, keys by 16", 4, 16), ("hack 2, sums", 2, 64)]
)
def test_sums_taken_anew_are_those_that_are_stored(
    device: torch.device, implementation: Any, name: str, bits: int, partition: int
) -> None:
    sequences = held(name, device, head_dim=128)
    queries = random_queries(sequences, 2, 1)
    expected = attended(implementation, sequences, queries)
    for planes in sequences.tokens.planes:
        planes[3].fill_(77)  # nothing reads these sums
    anew = hack(bits, partition, values_by=64, sums_anew=True).codecs(torch.float32)
    tokens = sequences.tokens._replace(codecs=anew)
    found = attended(implementation, Held(tokens, sequences.rows), queries)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("group", "count"), [(4, 1), (1, 1), (8, 1), (4, 5), (2, 8), (4, 9)])
@pytest.mark.parametrize("name", ATTENDED)
def test_triton_at_full_size(name: str, group: int, count: int, head_dim: int) -> None:
    """20001 and 777 tokens in bfloat16, read through page tables of random pages."""
    device, kv_heads = torch.device("cuda"), 8
    shape = {"pages": 90, "layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
    tokens = empty(name, device, torch.bfloat16, **shape)
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
