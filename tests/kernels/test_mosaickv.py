"""Packed vectors: which elements are kept, where they go, and products with them.

They are tested against loops and dense products.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantization_cases import tokens
from torch import Tensor

from cache_rank.kernels.mosaickv.vectors import (
    bitmap_bytes,
    decode,
    encode,
    lost_energy,
    pack_vectors,
    rotate,
    rotation_of,
    score_packed,
    unpack_vectors,
)

groups = st.sampled_from((1, 2, 4))
# A group divides the channels: those of any head dimension, times 4.
vectors = tokens((1, 5, 33)).map(lambda part: torch.cat((part, -part, part / 3, part), dim=-1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """(heads, n, C) float32 vectors, r and g."""
    rotated, group = draw(vectors).float(), draw(groups)
    kept = group * draw(st.integers(1, rotated.shape[-1] // group))
    return rotated, kept, group


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def covariance_of(part: Tensor) -> Tensor:
    return part.double().transpose(-1, -2) @ part.double()


def kept_channels(vector: list[float], kept: int, group: int) -> list[int]:
    """Of one vector, by sorting its groups in plain Python."""
    largest = max(map(abs, vector))
    if largest < torch.finfo(torch.float32).tiny:
        largest = 1.0

    def energy(index: int) -> float:
        part = torch.tensor(vector[index * group : (index + 1) * group])
        return float((part / largest).square().sum())

    order = sorted(range(len(vector) // group), key=lambda index: (-energy(index), index))
    return sorted(
        channel
        for index in order[: kept // group]
        for channel in range(index * group, (index + 1) * group)
    )


@given(case=cases())
def test_each_vector_keeps_its_own_largest_groups(case: tuple[Tensor, int, int]) -> None:
    rotated, kept, group = case
    channels = rotated.shape[-1]
    packed = pack_vectors(rotated, kept, group, torch.float32)
    assert packed.elements.shape == (*rotated.shape[:-1], kept)
    assert packed.bitmap.shape == (*rotated.shape[:-1], bitmap_bytes(channels, group))
    assert packed.bitmap.dtype == torch.uint8
    for vector, elements, bitmap in zip(
        rotated.flatten(0, 1).tolist(),
        packed.elements.flatten(0, 1).tolist(),
        packed.bitmap.flatten(0, 1).tolist(),
        strict=True,
    ):
        expected = kept_channels(vector, kept, group)
        assert elements == [vector[channel] for channel in expected]
        bits = int.from_bytes(bytes(bitmap), "little")
        assert bits == sum(1 << index for index in {channel // group for channel in expected})


@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_unpacked_vectors_have_zeros_for_what_was_not_kept(
    case: tuple[Tensor, int, int], dtype: torch.dtype
) -> None:
    rotated, kept, group = case
    limit = torch.finfo(dtype).max
    packed = pack_vectors(rotated, kept, group, dtype)
    assert packed.elements.dtype == dtype
    unpacked = unpack_vectors(packed, rotated.shape[-1], group)
    stored = rotated.clamp(-limit, limit).to(dtype).float()
    assert torch.equal(unpacked, torch.where(unpacked == 0, 0.0, stored))
    assert unpacked.isfinite().all()
    if kept == rotated.shape[-1]:
        assert torch.equal(unpacked, stored)


def test_ties_are_kept_toward_the_first_channels() -> None:
    packed = pack_vectors(torch.tensor([[1.0, -1, 1, 1, -1, 1, 1, 1]]), 4, 2, torch.float32)
    assert packed.elements.tolist() == [[1, -1, 1, 1]]
    assert packed.bitmap.tolist() == [[0b0011]]
    of_many = pack_vectors(torch.ones(3, 128), 20, 1, torch.float32)
    assert of_many.bitmap.tolist() == [[255, 255, 15, *[0] * 13]] * 3


@pytest.mark.parametrize("channels", [8, 6, 1])
def test_a_rotation_has_the_directions_of_most_energy(channels: int) -> None:
    part = normal(3, 100, 8) * torch.tensor([1.0, 9, 2, 8, 3, 7, 4, 6])
    part = rotate(part, torch.linalg.qr(normal(8, 8, seed=1)).Q)
    rotation = rotation_of(covariance_of(part), channels)
    assert rotation.shape == (3, 8, channels)
    identity = torch.eye(channels, dtype=torch.float64).expand(3, -1, -1)
    torch.testing.assert_close(rotation.transpose(-1, -2) @ rotation, identity)
    energy = (part.double() @ rotation).square().sum(dim=-2)
    assert (energy[:, :-1] >= energy[:, 1:]).all()
    lost = part.double().square().sum(dim=(-2, -1)) - energy.sum(dim=-1)
    smallest = torch.linalg.eigvalsh(covariance_of(part))[:, : 8 - channels].sum(dim=-1)
    torch.testing.assert_close(lost, smallest, rtol=1e-9, atol=1e-6)


@given(part=tokens((1, 5, 40)), data=st.data())
def test_what_decoding_misses_is_the_lost_energy(part: Tensor, data: st.DataObject) -> None:
    part = torch.cat((part, part.flip(-1)), dim=-1)
    head_dim = part.shape[-1]
    group = data.draw(st.sampled_from((1, 2)))
    channels = group * data.draw(st.integers(1, head_dim // group))
    kept = group * data.draw(st.integers(1, channels // group))
    rotation = rotation_of(covariance_of(part), channels)
    stored = lost_energy(part, encode(part, rotation, kept, group))
    assert ((stored >= 0) & (stored <= 1)).all()

    exact = part.float().clamp(-1e30, 1e30)  # whose norm is far from the end of the range
    packed = encode(exact, rotation, kept, group)
    missed = (exact.double() - decode(packed, rotation, group).double()).square().sum(dim=-1)
    energy = exact.double().square().sum(dim=-1)
    is_normal = energy > 1e-60
    share = missed[is_normal] / energy[is_normal]
    difference = share - lost_energy(exact, packed)[is_normal]
    assert (difference.abs() <= head_dim * torch.finfo(torch.float32).eps).all()


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 40)),
    head_dim=st.sampled_from((4, 8, 36)),
    group=groups,
    data=st.data(),
)
def test_products_with_packed_vectors_are_those_with_decoded_ones(
    shape: tuple[int, int, int], head_dim: int, group: int, data: st.DataObject
) -> None:
    heads, queries_of_head, count = shape
    channels = group * data.draw(st.integers(1, head_dim // group))
    kept = group * data.draw(st.integers(1, channels // group))
    part, queries = normal(heads, count, head_dim), normal(heads, queries_of_head, head_dim)
    rotation = rotation_of(covariance_of(part), channels)
    packed = encode(part, rotation, kept, group)
    decoded = decode(packed, rotation, group)
    found = score_packed(queries, packed, rotation, group, 0.5)
    expected = (queries @ decoded.transpose(-1, -2)) * 0.5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
