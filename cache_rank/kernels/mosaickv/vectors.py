"""Packed vectors of rotated keys and values (MosaicKV sections 4.2 and 5.1-5.3): specification.

The columns of a rotation R are the eigenvectors of a covariance KᵀK, largest eigenvalue first. In
that frame few elements of a vector carry most of its energy. The last columns are left out for all
vectors (channel truncation, section 5.2). Of the C channels that are left, each vector keeps r
elements of its own, those of largest magnitude, beside a bitmap of which they are (section 5.1):

    y = x R,   x ≈ unpack(pack(y)) Rᵀ

With an element group of g, g neighbouring channels share a bit, and the groups of most energy are
kept. The paper moves channels that are selected together next to each other, and does not say how;
here neighbours are those of similar eigenvalue, which are selected about as often.

A product with packed vectors rotates the other side once and not the vectors (section 5.3):
q·x = (q R)·y. What is lost is measured as energy, since R is orthonormal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PackedVectors(NamedTuple):
    """Vectors of C channels, each of which keeps r elements.

    Attributes:
        elements: (..., n, r) in the dtype of what was encoded, in the order of channels.
        bitmap: (..., n, ceil(C / g / 8)) uint8, a bit for each element group, the first one lowest.
    """

    elements: Tensor
    bitmap: Tensor


class Strategy(NamedTuple):
    """How tokens of one layer are compressed.

    Attributes:
        kept: r, how many elements each vector keeps.
        group: g, how many neighbouring elements share a bit.
        rotations: (2, Hkv, D, C), those of keys and of values, in the dtype of the tokens.
    """

    kept: int
    group: int
    rotations: Tensor

    def compress(self, tokens: Tensor) -> PackedVectors:
        """Compress keys and values, (2, Hkv, n, D)."""
        return encode(tokens, self.rotations, self.kept, self.group)


def rotation_of(covariance: Tensor, channels: int) -> Tensor:
    """Find the rotation that concentrates energy in C channels (sections 2.3 and 5.5).

    The covariance, (..., D, D), is the sum of xᵀx over vectors; not centred, as in the paper. The
    rotation, (..., D, C) float64, has orthonormal columns, largest eigenvalue first.
    """
    _, vectors = torch.linalg.eigh(covariance.double())  # ascending
    return vectors.flip(-1)[..., :channels].contiguous()


def rotate(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Compute x R: (..., n, D) times (..., D, C), any float dtypes, is (..., n, C) float32."""
    return vectors.float() @ rotation.float()


def bitmap_bytes(channels: int, group: int) -> int:
    """How many bytes the bitmap of one vector has."""
    return -(-channels // (8 * group))


def pack_vectors(rotated: Tensor, kept: int, group: int, dtype: torch.dtype) -> PackedVectors:
    """Keep each vector's largest elements (section 4.2, stage 1).

    Args:
        rotated: (..., n, C) float32.
        kept: r, a multiple of the group, at most C.
        group: g, which divides C.
        dtype: the dtype of the elements; what is beyond its range becomes its largest number.

    Returns:
        Packed vectors. Of groups of the same energy the first are kept.
    """
    groups = rotated.unflatten(-1, (-1, group))  # (..., n, C / g, g)
    largest = rotated.abs().amax(dim=-1, keepdim=True).unsqueeze(-1)
    # Relative to the largest element, so that squares neither overflow nor vanish. Vectors of
    # nothing but subnormal numbers stay as they are: not every device divides by these.
    is_normal = largest >= torch.finfo(torch.float32).tiny
    relative = groups / torch.where(is_normal, largest, torch.ones_like(largest))
    energy = torch.zeros_like(relative[..., 0])
    for part in relative.unbind(dim=-1):  # in order, so that ties are the same on every device
        energy = energy + part.square()
    order = energy.sort(dim=-1, descending=True, stable=True).indices
    chosen = order[..., : kept // group].sort(dim=-1).values
    elements = groups.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, group)).flatten(-2)
    limit = torch.finfo(dtype).max
    bits = torch.zeros_like(energy, dtype=torch.uint8).scatter_(-1, chosen, 1)
    return PackedVectors(elements.clamp(-limit, limit).to(dtype), _pack_bits(bits))


def unpack_vectors(packed: PackedVectors, channels: int, group: int) -> Tensor:
    """Unpack vectors, with zeros for what was not kept: (..., n, C) float32."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.bitmap.device)
    bits = (packed.bitmap.unsqueeze(-1) >> shifts & 1).flatten(-2)[..., : channels // group]
    is_kept = bits.repeat_interleave(group, dim=-1)
    rank = is_kept.cumsum(dim=-1) - 1  # int64: where among the elements a kept channel is
    elements = packed.elements.float().gather(-1, rank.clamp(min=0))
    return elements * is_kept


def encode(tokens: Tensor, rotation: Tensor, kept: int, group: int) -> PackedVectors:
    """Rotate and pack: (..., n, D) to packed vectors in the dtype of `tokens`."""
    return pack_vectors(rotate(tokens, rotation), kept, group, tokens.dtype)


def decode(packed: PackedVectors, rotation: Tensor, group: int) -> Tensor:
    """Unpack and rotate back, with the arguments of `encode`: (..., n, D) float32."""
    unpacked = unpack_vectors(packed, rotation.shape[-1], group)
    return unpacked @ rotation.float().transpose(-1, -2)


def score_packed(
    queries: Tensor, packed: PackedVectors, rotation: Tensor, group: int, scale: float
) -> Tensor:
    """Compute the attention logits of packed keys (section 5.3), (..., G, n) float32.

    Queries are (..., G, D) float32; rotation and group are those that the keys were encoded with.
    """
    keys = unpack_vectors(packed, rotation.shape[-1], group)
    return (rotate(queries, rotation) @ keys.transpose(-1, -2)) * scale


def lost_energy(tokens: Tensor, packed: PackedVectors) -> Tensor:
    """Measure the share of each vector's energy that its elements do not keep.

    The paper's compression loss (section 5.5) compares vectors with what is left of them, in a
    measure that it does not give; this is |x - x̂|² / |x|², (..., n) float64, and 0 for a vector of
    zeros. Tokens, (..., n, D), are the vectors before they were rotated.
    """
    energy = tokens.double().square().sum(dim=-1)
    kept = packed.elements.double().square().sum(dim=-1)
    share = 1 - kept / torch.where(energy == 0, torch.ones_like(energy), energy)
    return torch.where(energy == 0, torch.zeros_like(share), share.clamp(min=0))


def _pack_bits(bits: Tensor) -> Tensor:
    """Pack (..., n) uint8 of 0 and 1 to (..., ceil(n / 8)) uint8."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.unflatten(-1, (-1, 8)) << shifts).sum(dim=-1, dtype=torch.uint8)
