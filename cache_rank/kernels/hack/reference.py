"""Products on quantized keys (HACK sections 5.2-5.3), plain torch: the specification.

A partition is up to Π successive elements: channels of one key, or tokens of one channel of values.
Its elements become b-bit codes, asymmetrically:

    m = min,  s = (max - min) / (2^b - 1),  x ≈ m + s x',  x' in 0..2^b - 1

m and s are stored in the dtype of the elements, where m is exact. Keys also store the sum of the
codes of each partition: the query that keys are multiplied with gets 8-bit codes in the same
partitions, and the product is taken on codes (Eq. 4), a sum over the partitions z:

    q·k ≈ Σ_z [ s_q s_k Σ q'k'  +  m_q s_k Σ k'  +  m_k s_q Σ q'  +  Π m_q m_k ]

Σ q'k' is below 2^24, so that float32 holds it exactly in whatever order it is summed. Attention
weights are multiplied with values in the same way: they get 8-bit codes in partitions of tokens,

    Σ p v ≈ Σ_z [ s_p s_v Σ p'v'  +  m_p s_v Σ v'  +  m_v s_p Σ p'  +  Π m_p m_v ]

which do not depend on a factor on all of them. Values that are shipped are decoded.

Rounding is to the nearest code, half to even; or with a seed it is stochastic, up with the
probability that keeps the mean. The paper's is stochastic; nearest has less variance, and tokens
are ranked by single products. Random numbers are a hash of the seed and of what is rounded, and all
else is single float32 operations in a fixed order. So codes are the same bits on every device, in
whatever batches and order groups are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.coded.reference import Plane, quotient
from cache_rank.kernels.nibbles.reference import pack, unpack

GROUP = 64
"""This many tokens are quantized together; partitions divide it."""

QUERY_BITS = 8
"""A code of a query, or of an attention weight, has this many bits."""


class HackKeys(NamedTuple):
    """Codes of keys or of queries, and what they are relative to; Z = ceil(D / Π).

    Attributes:
        codes: (..., n, D · b / 8) uint8, see `pack`.
        minimum: (..., n, Z), m in the dtype of the elements.
        scale: (..., n, Z), s in the dtype of the elements.
        sums: (..., n, Z), the sum of the codes of each partition; uint8 if they fit, else int16.
    """

    codes: Tensor
    minimum: Tensor
    scale: Tensor
    sums: Tensor


class HackValues(NamedTuple):
    """Codes of values, and what they are relative to; Z = ceil(n / Π).

    Attributes:
        codes: (..., n, D · b / 8) uint8, see `pack`.
        minimum: (..., Z, D), m in the dtype of the elements.
        scale: (..., Z, D), s in the dtype of the elements.
    """

    codes: Tensor
    minimum: Tensor
    scale: Tensor


def encode_keys(tokens: Tensor, bits: int, partition: int, seed: int | None = None) -> HackKeys:
    """Quantize keys, each by itself.

    Args:
        tokens: (..., n, D), any float dtype; D is a multiple of 8 / bits.
        bits: b, which is 2, 4 or 8.
        partition: Π, in channels.
        seed: the seed of stochastic rounding; None rounds to the nearest.

    Returns:
        Codes, with a minimum, a scale and a sum for each token and partition. Tokens that are not
        finite, or span more than their dtype, leave a minimum or a scale that is not finite.
    """
    codes, minimum, scale = _encode(tokens, bits, partition, seed)
    sums = _sums_of_keys(codes, partition).to(sums_dtype(bits, partition))
    return HackKeys(pack(codes, bits), minimum, scale, sums)


def encode_values(tokens: Tensor, bits: int, partition: int, seed: int | None = None) -> HackValues:
    """Quantize values per channel, in partitions of `partition` tokens; see `encode_keys`."""
    columns = _encode(tokens.transpose(-1, -2), bits, partition, seed)
    codes, minimum, scale = (entries.transpose(-1, -2) for entries in columns)
    return HackValues(pack(codes, bits), minimum, scale)


def encode_queries(queries: Tensor, partition: int) -> HackKeys:
    """Quantize queries, (..., G, D) of any float dtype, to 8 bits; see `encode_keys`."""
    return encode_keys(queries.float(), QUERY_BITS, partition)


def decode(codes: HackKeys | HackValues, bits: int, partition: int) -> Tensor:
    """Decode keys, queries or values, with the arguments of their encoding: (..., n, D) float32.

    Values may have entries of tokens, in place of those of partitions, with a partition of 1.
    """
    dim = -1 if isinstance(codes, HackKeys) else -2
    found = unpack(codes.codes, bits)
    minimum, scale = (
        entries.float().repeat_interleave(partition, dim=dim).narrow(dim, 0, found.shape[dim])
        for entries in (codes.minimum, codes.scale)
    )
    return minimum + scale * found


def score_keys(queries: Tensor, keys: HackKeys, scale: float, bits: int, partition: int) -> Tensor:
    """Compute attention logits on the codes of queries and keys (Eq. 4).

    No term of the product is the same for all tokens, so that none cancels in a softmax. Where no
    logit of a sequence is off by more than e, no score of `score_tokens`, the largest
    log-probability over the heads of a group, is off by more than 2 e.

    Args:
        queries: (..., G, D) float32, the query heads of the keys' kv head.
        keys: codes of (..., n, D).
        scale: factor on the logits.
        bits, partition: those that the keys were encoded with.

    Returns:
        (..., G, n) float32.
    """
    encoded = encode_queries(queries, partition)
    logits = torch.zeros((), device=queries.device)
    query_parts = encoded.codes.float().split(partition, dim=-1)  # 8 bits are not packed
    key_parts = unpack(keys.codes, bits).float().split(partition, dim=-1)
    for index, (query, key) in enumerate(zip(query_parts, key_parts, strict=True)):
        query_minimum, query_scale, query_sum = (
            entries[..., :, index, None].float() for entries in encoded[1:]
        )  # (..., G, 1)
        key_minimum, key_scale, key_sum = (
            entries[..., None, :, index].float() for entries in keys[1:]
        )  # (..., 1, n)
        logits = logits + query_scale * key_scale * (query @ key.transpose(-1, -2))
        logits = logits + query_minimum * key_scale * key_sum
        logits = logits + key_minimum * query_scale * query_sum
        logits = logits + query.shape[-1] * query_minimum * key_minimum
    return logits * scale


class HackCodec(NamedTuple):
    """The codec of keys, or of values; see coded/reference.py.

    Attributes:
        of_keys: whether it encodes keys.
        dtype: the dtype of the tokens.
        bits, partition, seed: see `encode_keys`.
        value_sums: whether the sums of the codes of values are stored too, for attention.
        sums_anew: whether sums are taken from the codes whenever they are needed, and those that
            are stored are not read: HACK without summation elimination (section 7.4).
    """

    of_keys: bool
    dtype: torch.dtype
    bits: int = 2
    partition: int = 64
    seed: int | None = None
    value_sums: bool = False
    sums_anew: bool = False

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """The tensors of `HackKeys`, or of `HackValues`, and the sums of values if they are stored.

        These are (..., Z, D) in the dtype of those of keys.
        """
        codes = Plane(GROUP, head_dim * self.bits // 8, torch.uint8)
        if not self.of_keys:
            relative_to = Plane(GROUP // self.partition, head_dim, self.dtype)
            sums = relative_to._replace(dtype=sums_dtype(self.bits, self.partition))
            return (codes, relative_to, relative_to, *((sums,) if self.value_sums else ()))
        partitions = -(-head_dim // self.partition)
        relative_to = Plane(GROUP, partitions, self.dtype)
        sums = Plane(GROUP, partitions, sums_dtype(self.bits, self.partition))
        return codes, relative_to, relative_to, sums

    def encode(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Encode complete groups."""
        if self.of_keys:
            return encode_keys(tokens, self.bits, self.partition, self.seed)
        values = encode_values(tokens, self.bits, self.partition, self.seed)
        if not self.value_sums:
            return values
        parts = unpack(values.codes, self.bits).unflatten(-2, (-1, self.partition))
        sums = parts.sum(dim=-2, dtype=torch.int16)
        return (*values, sums.to(sums_dtype(self.bits, self.partition)))

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        """Decode tokens."""
        if self.of_keys:
            return decode(HackKeys(*entries), self.bits, self.partition)
        return decode(HackValues(*entries[:3]), self.bits, partition=1)

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float) -> Tensor:
        """Compute the logits of groups of keys on their codes."""
        keys = HackKeys(*planes)
        if self.sums_anew:
            keys = keys._replace(sums=_sums_of_keys(unpack(keys.codes, self.bits), self.partition))
        return score_keys(queries, keys, scale, self.bits, self.partition)

    def weigh(self, weights: Tensor, planes: Sequence[Tensor]) -> Tensor:
        """Add up the values of groups by their weights: what the codes of both decode to.

        So no sums of codes are needed here, with `sums_anew` or without.
        """
        decoded = decode(encode_queries(weights, self.partition), QUERY_BITS, self.partition)
        return decoded @ decode(HackValues(*planes[:3]), self.bits, self.partition)


def sums_dtype(bits: int, partition: int) -> torch.dtype:
    """The dtype that holds the sum of a partition's codes."""
    return torch.uint8 if ((1 << bits) - 1) * partition < 256 else torch.int16


def _sums_of_keys(codes: Tensor, partition: int) -> Tensor:
    parts = codes.split(partition, dim=-1)
    return torch.stack([part.sum(dim=-1, dtype=torch.int16) for part in parts], dim=-1)


def _encode(
    rows: Tensor, bits: int, partition: int, seed: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (..., length) int16, and minimum and scale (..., Z) of partitions of the last dim."""
    parts = [_encode_partition(part, bits, seed) for part in rows.split(partition, dim=-1)]
    codes, minimum, scale = (torch.cat(entries, dim=-1) for entries in zip(*parts, strict=True))
    return codes, minimum, scale


def _encode_partition(
    elements: Tensor, bits: int, seed: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (..., up to Π) int16, and minimum and scale (..., 1) each."""
    most = (1 << bits) - 1
    exact = elements.float()
    minimum = exact.amin(dim=-1, keepdim=True) + 0.0  # of 0 and -0 either may be the smaller
    # Divided by a tensor: by a number, some devices multiply with the inverse.
    scale = (exact.amax(dim=-1, keepdim=True) - minimum) / torch.full_like(minimum, most)
    scale = scale.to(elements.dtype)  # as stored, before anything is taken relative to it
    offset = quotient(exact - minimum, scale.float())
    if seed is None:
        rounded = offset.round()
    else:
        rounded = (offset + _uniform(seed, minimum, scale.float(), exact)).floor()
    # Where the elements are not finite the scale tells so, or the minimum, and codes mean nothing.
    codes = rounded.nan_to_num().clamp(0, most).to(torch.int16)
    return codes, minimum.to(elements.dtype), scale


def _uniform(seed: int, minimum: Tensor, scale: Tensor, elements: Tensor) -> Tensor:
    """Numbers in [0, 1), one an element: a hash of it, of its place in its partition and of that.

    What arrives together, and where it is kept, has no part in it.
    """
    place = torch.arange(elements.shape[-1], device=elements.device)
    state = _mix((place + seed * 0x10001) & 0xFFFFFFFF)
    for numbers in (minimum, scale, elements):
        state = _mix(state ^ (numbers.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF))
    return (state >> 8).float() / (1 << 24)


def _mix(state: Tensor) -> Tensor:
    """Scramble 32-bit integers held as int64; no product reaches 2^63."""
    for _ in range(2):
        state = ((state >> 16 ^ state) * 0x45D9F3B) & 0xFFFFFFFF
    return state >> 16 ^ state
