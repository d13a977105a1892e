"""Products on quantized keys and values (HACK sections 5.2-5.3), plain torch: the specification.

A partition is up to Π successive elements along the dimension that a product sums over: channels of
one key, tokens of one channel of values. Its elements become b-bit codes, asymmetrically:

    m = min,  s = (max - min) / (2^b - 1),  x ≈ m + s x',  x' in 0..2^b - 1

m and s are stored in the dtype of the elements, where m is exact, beside the sum of the codes. What
keys and values are multiplied with, queries and attention probabilities, gets 8-bit codes in the
same partitions, and the product is taken on codes (Eq. 4), a sum over the partitions z:

    a·b ≈ Σ_z [ s_a s_b Σ a'b'  +  m_a s_b Σ b'  +  m_b s_a Σ a'  +  Π m_a m_b ]

Σ a'b' is below 2^24, so that float32 holds it exactly in whatever order it is summed.

Rounding is to the nearest code, half to even; or with a seed it is stochastic, up with the
probability that keeps the mean. The paper's is stochastic; nearest has less variance, and tokens
are ranked by single products. Random numbers are a hash of the seed and of what is rounded, and all
else single float32 operations in a fixed order: codes are the same bits on every device, in
whatever batches and order groups are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from cache_rank_kernels.coded.reference import Plane
from torch import Tensor

GROUP = 64
"""Tokens that are quantized together; partitions divide it."""

MULTIPLIER_BITS = 8
"""Of queries and of probabilities."""


class HackCodes(NamedTuple):
    """Codes of a matrix, (..., rows, columns), and what they are relative to.

    A partition is of a row, so that the last three are (..., rows, Z); or it is of a column, as
    those of values, and they are (..., Z, columns). Z = ceil(length / Π).

    Attributes:
        codes: (..., rows, columns · b / 8) uint8, see `pack`.
        minimum: m, in the dtype of the elements.
        scale: s, in the dtype of the elements.
        sums: of the codes of a partition, uint8 if they fit, else int16.
    """

    codes: Tensor
    minimum: Tensor
    scale: Tensor
    sums: Tensor


def encode_keys(tokens: Tensor, bits: int, partition: int, seed: int | None = None) -> HackCodes:
    """Quantize keys, each by itself.

    Args:
        tokens: (..., n, D) of any float dtype; D is a multiple of 8 / bits.
        bits: b: 2, 4 or 8.
        partition: Π, in channels.
        seed: of stochastic rounding; None rounds to the nearest.

    Returns:
        Codes, with a minimum, a scale and a sum a token and partition. Tokens that are not finite,
        or span more than their dtype, leave a minimum or a scale that is not.
    """
    return _encode(tokens, bits, partition, seed, by_column=False)


def encode_values(tokens: Tensor, bits: int, partition: int, seed: int | None = None) -> HackCodes:
    """Quantize values per channel: as `encode_keys`, with partitions of `partition` tokens."""
    return _encode(tokens, bits, partition, seed, by_column=True)


def encode_multipliers(rows: Tensor, partition: int, seed: int | None = None) -> HackCodes:
    """Quantize queries, (..., G, D), or probabilities, (..., G, n), to 8 bits: `encode_keys`."""
    return encode_keys(rows.float(), MULTIPLIER_BITS, partition, seed)


def decode_keys(codes: HackCodes, bits: int, partition: int) -> Tensor:
    """Decode keys, or queries or probabilities, with the arguments of their encoding.

    Returns:
        (..., n, D) float32.
    """
    found = unpack(codes.codes, bits)
    minimum, scale = (
        entries.float().repeat_interleave(partition, dim=-1)[..., : found.shape[-1]]
        for entries in (codes.minimum, codes.scale)
    )
    return minimum + scale * found


def decode_values(codes: HackCodes, bits: int, partition: int) -> Tensor:
    """Decode values: (..., n, D) float32.

    Args:
        codes: with entries of partitions; or, for a partition of 1, of each token.
        bits: that they were encoded with.
        partition: tokens of an entry.
    """
    found = unpack(codes.codes, bits)
    minimum, scale = (
        entries.float().repeat_interleave(partition, dim=-2)[..., : found.shape[-2], :]
        for entries in (codes.minimum, codes.scale)
    )
    return minimum + scale * found


def score_keys(
    queries: Tensor, codes: HackCodes, scale: float, bits: int, partition: int
) -> Tensor:
    """Attention logits of keys, on codes.

    Every term of a product differs between tokens, the last two by the key's minimum: none cancels
    in a softmax. Where no logit of a sequence is off by more than e, no score of `score_tokens`,
    the largest log-probability over the heads of a group, is off by more than 2 e.

    Args:
        queries: (..., G, D) float32, the query heads of the kv head that the keys are of.
        codes: of `encode_keys`, (..., n, D).
        scale: factor on the logits.
        bits, partition: that the keys were encoded with.

    Returns:
        (..., G, n) float32.
    """
    transposed = HackCodes(
        unpack(codes.codes, bits).transpose(-1, -2),
        *(entries.transpose(-1, -2) for entries in codes[1:]),
    )
    return _product(encode_multipliers(queries, partition), transposed, partition) * scale


def attention_output(
    probabilities: Tensor, codes: HackCodes, newest: Tensor, bits: int, partition: int
) -> Tensor:
    """Attention output of values, on codes for all but the newest tokens.

    Args:
        probabilities: (..., G, n + r) float32, over n encoded tokens and r newer ones.
        codes: of `encode_values`, (..., n, D).
        newest: (..., r, D) of any float dtype: the last, incomplete partition as it came.
        bits, partition: that the values were encoded with.

    Returns:
        (..., G, D) float32.
    """
    coded = codes.codes.shape[-2]
    output = probabilities[..., coded:] @ newest.float()
    if not coded:
        return output
    multipliers = encode_multipliers(probabilities[..., :coded], partition)
    values = codes._replace(codes=unpack(codes.codes, bits))
    return output + _product(multipliers, values, partition)


class HackCodec(NamedTuple):
    """Encodes keys, in partitions of channels, or values, of tokens; see coded/reference.py.

    Attributes:
        of_keys: whether they are keys.
        dtype: of the tokens.
        bits, partition, seed: see `encode_keys`.
    """

    of_keys: bool
    dtype: torch.dtype
    bits: int = 2
    partition: int = 64
    seed: int | None = None

    def planes(self, head_dim: int) -> tuple[Plane, ...]:
        """As in HackCodes."""
        if self.of_keys:
            entries, width = GROUP, -(-head_dim // self.partition)
        else:
            entries, width = GROUP // self.partition, head_dim
        codes = Plane(GROUP, head_dim * self.bits // 8, torch.uint8)
        relative_to = Plane(entries, width, self.dtype)
        sums = Plane(entries, width, sums_dtype(self.bits, self.partition))
        return codes, relative_to, relative_to, sums

    def encode(self, tokens: Tensor) -> HackCodes:
        """Encode complete groups."""
        encode = encode_keys if self.of_keys else encode_values
        return encode(tokens, self.bits, self.partition, self.seed)

    def decode(self, entries: Sequence[Tensor]) -> Tensor:
        """Decode tokens."""
        if self.of_keys:
            return decode_keys(HackCodes(*entries), self.bits, self.partition)
        return decode_values(HackCodes(*entries), self.bits, partition=1)

    def score(self, queries: Tensor, planes: Sequence[Tensor], scale: float, exact: bool) -> Tensor:
        """Logits of groups of keys: on codes, or exactly by queries as they are."""
        codes = HackCodes(*planes)
        if exact:
            keys = decode_keys(codes, self.bits, self.partition)
            return (queries @ keys.transpose(-1, -2)) * scale
        return score_keys(queries, codes, scale, self.bits, self.partition)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, (..., D) integers below 2^bits, to (..., D · bits / 8) uint8.

    Codes that are D · bits / 8 columns apart share a byte, the first in the lowest bits: a shift
    and a mask unpack a stretch of columns in order.
    """
    parts = codes.to(torch.uint8).chunk(8 // bits, dim=-1)
    packed = torch.zeros_like(parts[0])
    for index, part in enumerate(parts):
        packed |= part << (index * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes: (..., D · bits / 8) uint8 to (..., D) uint8."""
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.cat(parts, dim=-1)


def sums_dtype(bits: int, partition: int) -> torch.dtype:
    """That holds the sum of a partition's codes."""
    return torch.uint8 if ((1 << bits) - 1) * partition < 256 else torch.int16


def _encode(
    tokens: Tensor, bits: int, partition: int, seed: int | None, by_column: bool
) -> HackCodes:
    rows = tokens.transpose(-1, -2) if by_column else tokens
    parts = [_encode_partition(part, bits, seed) for part in rows.split(partition, dim=-1)]
    codes, *relative_to = (torch.cat(entries, dim=-1) for entries in zip(*parts, strict=True))
    if by_column:
        codes, *relative_to = (entries.transpose(-1, -2) for entries in (codes, *relative_to))
    minimum, scale, sums = relative_to
    return HackCodes(pack(codes, bits), minimum, scale, sums.to(sums_dtype(bits, partition)))


def _encode_partition(
    elements: Tensor, bits: int, seed: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (..., up to Π), and minimum, scale and sum (..., 1) each."""
    most = (1 << bits) - 1
    exact = elements.float()
    minimum = exact.amin(dim=-1, keepdim=True) + 0.0  # of 0 and -0 either may be the smaller
    # Divided by a tensor: by a number, some devices multiply with the inverse.
    scale = (exact.amax(dim=-1, keepdim=True) - minimum) / torch.full_like(minimum, most)
    scale = scale.to(elements.dtype)  # as stored, before anything is taken relative to it
    offset = _quotient(exact - minimum, scale.float())
    if seed is None:
        rounded = offset.round()
    else:
        rounded = (offset + _uniform(seed, minimum, scale.float(), exact)).floor()
    # Where the elements are not finite the scale tells so, or the minimum, and codes mean nothing.
    codes = rounded.nan_to_num().clamp(0, most).to(torch.int16)
    sums = codes.sum(dim=-1, keepdim=True, dtype=torch.int16)
    return codes, minimum.to(elements.dtype), scale, sums


def _product(left: HackCodes, right: HackCodes, partition: int) -> Tensor:
    """The matrix product of (..., M, N) and (..., N, O), of unpacked codes; float32.

    The partitions of `left` are of its rows, those of `right` of its columns.
    """
    out = torch.zeros((), device=left.codes.device)
    left_parts = left.codes.float().split(partition, dim=-1)
    right_parts = right.codes.float().split(partition, dim=-2)
    for index, (row, column) in enumerate(zip(left_parts, right_parts, strict=True)):
        row_minimum, row_scale, row_sum = (
            entries[..., :, index, None].float() for entries in left[1:]
        )  # (..., M, 1)
        column_minimum, column_scale, column_sum = (
            entries[..., index, None, :].float() for entries in right[1:]
        )  # (..., 1, O)
        out = out + row_scale * column_scale * (row @ column)
        out = out + row_minimum * column_scale * column_sum
        out = out + column_minimum * row_scale * row_sum
        out = out + row.shape[-1] * row_minimum * column_minimum
    return out


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, and 0 where the denominator is 0: there all elements are the same."""
    quotient = numerator / denominator
    return torch.where(denominator == 0, torch.zeros_like(quotient), quotient)


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
