"""HACK codes: their error, that products on them are those of what they decode to, and rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantization_cases import normalized_error, tokens
from torch import Tensor

from cache_rank.kernels.hack.reference import (
    GROUP,
    HackKeys,
    HackValues,
    decode,
    encode_keys,
    encode_queries,
    encode_values,
    score_keys,
)
from cache_rank.kernels.nibbles.reference import pack, unpack

# Codes of 2 bits fill bytes when channels are a multiple of 4: 4, 16, 28 or 128 of them.
groups = tokens((1, 40, GROUP, 3 * GROUP)).map(lambda group: torch.cat((group, -group), dim=-1))
widths = st.sampled_from((2, 4, 8))
partitions = st.sampled_from((16, 32, 64))
seeds = st.one_of(st.none(), st.integers(0, 65535))
encoders = pytest.mark.parametrize("encode", [encode_keys, encode_values], ids=["keys", "values"])
SINGLE = torch.finfo(torch.float32)
Codes = HackKeys | HackValues


def of_each(entries: Tensor, partition: int, count: int, dim: int) -> Tensor:
    """What a partition shares, repeated for each of its elements."""
    return entries.repeat_interleave(partition, dim=dim).narrow(dim, 0, count)


def largest_error(
    codes: Codes, bits: int, partition: int, shape: torch.Size, dim: int, of_step: float
) -> Tensor:
    """Of decoding, float64: so much of a step, and what storing a step in its dtype rounds."""
    dtype = torch.finfo(codes.scale.dtype)
    most = 2**bits - 1
    step, minimum = (
        of_each(entries, partition, shape[dim], dim).double()
        for entries in (codes.scale, codes.minimum)
    )
    rounded = most * (dtype.eps / 2 * step + dtype.smallest_normal * dtype.eps)
    return of_step * step + rounded + 4 * SINGLE.eps * (minimum.abs() + most * step)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_codes_come_back_and_the_first_is_lowest(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (256, 40), generator=torch.Generator().manual_seed(0))
    packed = pack(codes, bits)
    width = 40 * bits // 8
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits), codes.to(torch.uint8))
    number = sum(part << index * bits for index, part in enumerate(codes.split(width, dim=-1)))
    assert torch.equal(packed, number.to(torch.uint8))


@given(group=groups, bits=widths, partition=partitions, seed=seeds, by_channel=st.booleans())
def test_decoding_is_within_a_step(
    group: Tensor, bits: int, partition: int, seed: int | None, by_channel: bool
) -> None:
    encode, dim = (encode_values, -2) if by_channel else (encode_keys, -1)
    codes = encode(group, bits, partition, seed)
    decoded = decode(codes, bits, partition)
    assert decoded.dtype == torch.float32
    assert decoded.shape == group.shape
    of_step = 0.5 if seed is None else 1.0
    allowed = largest_error(codes, bits, partition, group.shape, dim, of_step)
    assert ((group.double() - decoded.double()).abs() <= allowed).all()


@given(group=groups, bits=widths, partition=partitions, seed=seeds)
def test_a_partition_has_its_minimum_its_scale_and_of_keys_the_sum_of_its_codes(
    group: Tensor, bits: int, partition: int, seed: int | None
) -> None:
    heads, count, head_dim = group.shape
    for encode, dim, shape in (
        (encode_keys, -1, (heads, count, -(-head_dim // partition))),
        (encode_values, -2, (heads, -(-count // partition), head_dim)),
    ):
        codes = encode(group, bits, partition, seed)
        assert codes.codes.shape == (heads, count, head_dim * bits // 8)
        assert codes.minimum.dtype == codes.scale.dtype == group.dtype
        smallest = torch.stack([part.amin(dim) for part in group.split(partition, dim)], dim)
        assert codes.minimum.shape == codes.scale.shape == shape
        assert torch.equal(codes.minimum, smallest)
        if encode is encode_keys:
            found = unpack(codes.codes, bits).long()
            sums = torch.stack([part.sum(dim) for part in found.split(partition, dim)], dim)
            assert torch.equal(codes.sums, sums.to(codes.sums.dtype))
            assert codes.sums.element_size() == (1 if (2**bits - 1) * partition < 256 else 2)


@encoders
@pytest.mark.parametrize("bits", [2, 4])
def test_codes_are_those_of_the_formula(encode: Callable[..., Codes], bits: int) -> None:
    group = torch.randn(GROUP, GROUP, generator=torch.Generator().manual_seed(2)).double()
    dim = -1 if encode is encode_keys else -2
    smallest = group.amin(dim, keepdim=True)
    step = (group.amax(dim, keepdim=True) - smallest) / (2**bits - 1)
    exact = (group - smallest) / step
    found = unpack(encode(group.float(), bits, GROUP).codes, bits)
    clear = (exact % 1 - 0.5).abs() > 1e-3  # not a tie, but for float32
    assert torch.equal(found[clear].double(), exact.round()[clear])
    assert clear.float().mean() > 0.99


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from((1, 64, 70))),
    head_dim=st.sampled_from((8, 64, 96, 128)),
    bits=st.sampled_from((2, 4)),
    partition=partitions,
    offset=st.sampled_from((0.0, -30.0, 1000.0)),
    seed=seeds,
)
def test_products_on_codes_are_those_of_what_they_decode_to(
    shape: tuple[int, int, int],
    head_dim: int,
    bits: int,
    partition: int,
    offset: float,
    seed: int | None,
) -> None:
    """To the rounding of a handful of float32 operations a partition."""
    heads, group, count = shape
    generator = torch.Generator().manual_seed(head_dim + count)
    tokens = torch.randn(heads, count, head_dim, generator=generator) + offset
    queries = torch.randn(heads, group, head_dim, generator=generator)

    keys = encode_keys(tokens, bits, partition, seed)
    found = score_keys(queries, keys, 0.25, bits, partition) * 4
    encoded = encode_queries(queries, partition)
    decoded = decode(keys, bits, partition).double().transpose(-1, -2)
    expected = decode(encoded, 8, partition).double() @ decoded
    # Terms may cancel: the four are of the size of the ranges, not of the elements.
    largest = of_each(encoded.minimum.abs() + 255 * encoded.scale, partition, head_dim, -1)
    sizes = largest.double() @ decoded.abs().amax(-1, keepdim=True)
    steps = 8 + 4 * -(-head_dim // partition)
    assert ((found.double() - expected).abs() <= 4 * steps * SINGLE.eps * (sizes + 1)).all()


@encoders
@pytest.mark.parametrize("bits", [2, 4])
def test_stochastic_rounding_keeps_the_mean(encode: Callable[..., Codes], bits: int) -> None:
    """Over seeds, of every element: the mean of n is off by five of its deviations at most."""
    group = torch.randn(GROUP, GROUP, generator=torch.Generator().manual_seed(4))
    repeated = 150
    mean = torch.zeros_like(group, dtype=torch.float64)
    for seed in range(repeated):
        mean += decode(encode(group, bits, GROUP, seed), bits, GROUP) / repeated
    codes = encode(group, bits, GROUP)
    step = of_each(codes.scale, GROUP, GROUP, -1 if encode is encode_keys else -2).double()
    assert ((mean - group).abs() <= 5 * 0.5 * step / repeated**0.5 + 1e-6).all()
    assert (mean - group).mean().abs() < 5 * 0.5 * step.max() / (repeated * GROUP**2) ** 0.5
    assert normalized_error(group, mean) < normalized_error(group, decode(codes, bits, GROUP)) / 20


@encoders
def test_stochastic_rounding_is_a_function_of_the_seed(encode: Callable[..., Codes]) -> None:
    group = torch.randn(3, GROUP, 16)
    state = torch.get_rng_state()
    one, again, other = (encode(group, 2, 16, seed).codes for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    # So do equal ones, of which a partition has many.
    equal = torch.full((4, GROUP), 0.4)
    equal[:, :2] = torch.tensor([0.0, 1.0])
    equal = equal.t() if encode is encode_values else equal
    rounded = decode(encode(equal, 2, GROUP, 1), 2, GROUP)[equal == 0.4]
    assert (rounded > 0.4).double().mean() == pytest.approx(0.2, abs=0.12)
    # Elements round independently of their neighbours, although their seed is the same.
    up = (unpack(one, 2) > unpack(encode(group, 2, 16, 0).codes, 2)).double().flatten(0, 1)
    assert 0.05 < up.mean() < 0.4
    correlation = torch.corrcoef(torch.stack((up[:, :-1].flatten(), up[:, 1:].flatten())))
    assert correlation[0, 1].abs() < 0.1
