"""Attention over HACK codes where they lie (HACK sections 5.2-5.3), Triton.

Logits are products of codes with 8-bit codes of queries, as for scores. Weights of the tokens of a
partition of values get 8-bit codes, too, and are multiplied with codes of values. Their products,
of whole numbers in float16, are exact. Bytes would have to be transposed for products of integers;
words of 16 bits, each of them codes of several channels, the matrix unit takes as they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cache_rank.kernels.coded.format import Launch, Parameters
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.rounding import nearest_integers
from cache_rank.kernels.hack.queries import logits_on_codes, query_operands
from cache_rank.kernels.hack.reference import HackCodec
from cache_rank.kernels.nibbles.triton import code_as_half


class _Attending(NamedTuple):
    """What `attend` is compiled for.

    Attributes:
        bits, partition, width, columns, bytes, block: those of keys, as for scores; a block is a
            group.
        value_partition: the tokens of a partition of values.
        value_sums: whether the sums of the codes of values are stored.
    """

    bits: int
    partition: int
    width: int
    columns: int
    bytes: int
    block: int
    value_partition: int
    value_sums: bool


def attending(tokens: CodedTokens, padded: int) -> Parameters:
    """See `Format`."""
    (keys, values), head_dim = tokens.codecs, tokens.rings[0].shape[-1]
    assert isinstance(keys, HackCodec)
    assert isinstance(values, HackCodec)
    assert keys.bits == values.bits
    partition, width = min(keys.partition, head_dim), head_dim * keys.bits // 8
    constants = _Attending(
        keys.bits,
        partition,
        width,
        padded * (head_dim // partition),
        max(32, width),  # the matrix unit takes no fewer
        tokens.group_tokens,
        values.partition,
        values.value_sums,
    )
    launch = Launch(warps=2, programs=4) if padded <= 8 else Launch(warps=4)
    return Parameters((), constants, launch)


@triton.jit
def _weight_codes(weights, PADDED: tl.constexpr, COUNT: tl.constexpr, CONSTANTS: tl.constexpr):
    """Quantize the weights of a block to 8 bits, in partitions of tokens.

    Args:
        weights: (block, PADDED) float32.
        COUNT: the partitions of a block.

    Returns:
        The codes as the columns of a product, (block, PADDED · COUNT) float16: column
        row · COUNT + z has 0 outside of partition z. And minimum, scale and sum of codes of each
        partition and row, (COUNT, 1, PADDED) float32.
    """
    BLOCK: tl.constexpr = CONSTANTS.block
    parts = tl.reshape(weights, (COUNT, CONSTANTS.value_partition, PADDED))
    minimum = tl.min(parts, axis=1, keep_dims=True)
    scale = (tl.max(parts, axis=1, keep_dims=True) - minimum) * (1.0 / 255.0)
    # Where weights are too small to add anything, all codes are 0.
    inverse = tl.where(scale < 1e-30, 0.0, 1.0 / tl.maximum(scale, 1e-30))
    codes = tl.clamp(nearest_integers((parts - minimum) * inverse), 0.0, 255.0)
    sums = tl.sum(codes, axis=1, keep_dims=True)
    columns = tl.reshape(codes, (BLOCK, PADDED)).to(tl.float16)
    if COUNT > 1:
        partition = tl.arange(0, BLOCK) // CONSTANTS.value_partition
        used = partition[:, None, None] == tl.arange(0, COUNT)[None, None, :]
        columns = tl.where(used, columns[:, :, None], 0.0).to(tl.float16)
        columns = tl.reshape(columns, (BLOCK, PADDED * COUNT))
    return columns, minimum, scale, sums


@triton.jit
def _parts(numbers, COUNT: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Of (COUNT, D), the channels of each code of a word: (COUNT, D / 4) or (COUNT, D / 8) each.

    A word is two successive bytes, and codes of a byte are of channels that are a stretch apart.
    """
    if BITS == 4:
        even, odd = tl.split(tl.reshape(numbers, (COUNT, 2, WORDS, 2)))
        first, second = tl.split(tl.permute(even, (0, 2, 1)))
        third, fourth = tl.split(tl.permute(odd, (0, 2, 1)))
        return first, second, third, fourth
    else:
        even, odd = tl.split(tl.reshape(numbers, (COUNT, 4, WORDS, 2)))
        halves = tl.permute(tl.reshape(even, (COUNT, 2, 2, WORDS)), (0, 3, 2, 1))
        lower, upper = tl.split(halves)
        first, second = tl.split(lower)
        third, fourth = tl.split(upper)
        halves = tl.permute(tl.reshape(odd, (COUNT, 2, 2, WORDS)), (0, 3, 2, 1))
        lower, upper = tl.split(halves)
        fifth, sixth = tl.split(lower)
        seventh, eighth = tl.split(upper)
        return first, second, third, fourth, fifth, sixth, seventh, eighth


@triton.jit
def _in_order(parts, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    """Bring `_parts`, (channels, PADDED) each, into the order of channels: (D, PADDED)."""
    if BITS == 4:
        joined = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
        ordered = tl.permute(joined, (2, 0, 3, 1))
    else:
        even = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
        odd = tl.join(tl.join(parts[4], parts[5]), tl.join(parts[6], parts[7]))
        # [words, PADDED, first of two bits, second, byte]
        ordered = tl.permute(tl.join(even, odd), (3, 2, 0, 4, 1))
    return tl.reshape(ordered, (HEAD_DIM, PADDED))


@triton.jit
def _weigh(
    words,
    step,
    weights,
    INDEX: tl.constexpr,
    PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Add up some channels of a block of values by their weights, but for what is in `_rest`.

    Products are sums of whole numbers below 2^24, and exact.

    Args:
        words: (words, block) uint16.
        step: (COUNT, words), the scales of the channels of code INDEX.
        weights: what `_weight_codes` returns.

    Returns:
        (words, PADDED) float32.
    """
    columns, _, scale, _ = weights
    product = tl.dot(code_as_half(words, INDEX, CONSTANTS.bits, INTERPRETED), columns)
    if COUNT == 1:
        return product * tl.reshape(step, (words.shape[0], 1)) * tl.reshape(scale, (1, PADDED))
    else:
        product = tl.reshape(product, (words.shape[0], PADDED, COUNT))
        factors = tl.permute(step, (1, 0))[:, None, :] * tl.permute(scale, (1, 2, 0))
        return tl.sum(product * factors, axis=2)


@triton.jit
def _rest(words, planes, at, step, weights, COUNT: tl.constexpr, CONSTANTS: tl.constexpr):
    """What a block of values adds beside the products of codes: (D, PADDED) float32.

    Args:
        words: (words, block) uint16.
        planes: those of values.
        at: (COUNT, D), the place of what they are relative to.
        step: (COUNT, D), their scales.
        weights: what `_weight_codes` returns.
    """
    _, minimum, scale, sums = weights
    SIZE: tl.constexpr = CONSTANTS.value_partition
    value_minimum = tl.load(planes[1] + at).to(tl.float32)
    if CONSTANTS.value_sums:
        value_sum = tl.load(planes[3] + at).to(tl.float32)
    else:
        value_sum = _sums_of_values(words, COUNT, CONSTANTS)
    of_codes = scale * sums
    rest = value_minimum[:, :, None] * (of_codes + SIZE * minimum)
    rest += step[:, :, None] * (value_sum[:, :, None] * minimum - 64.0 * of_codes)
    return tl.sum(rest, axis=0)


@triton.jit
def _sums_of_values(words, COUNT: tl.constexpr, CONSTANTS: tl.constexpr):
    """Sum up the codes of values of each partition: (COUNT, D) float32."""
    WORDS: tl.constexpr = words.shape[0]
    PER_BYTE: tl.constexpr = 8 // CONSTANTS.bits
    parts = tl.reshape(words.to(tl.int32), (1, WORDS, 1, COUNT, CONSTANTS.value_partition))
    # Codes [of a byte, word, byte, partition, token]
    shift = CONSTANTS.bits * tl.arange(0, PER_BYTE)[:, None, None, None, None]
    shift += 8 * tl.arange(0, 2)[None, None, :, None, None]
    codes = (parts >> shift) & ((1 << CONSTANTS.bits) - 1)
    sums = tl.permute(tl.sum(codes, axis=4), (3, 0, 1, 2))
    return tl.reshape(sums, (COUNT, PER_BYTE * WORDS * 2)).to(tl.float32)


@triton.jit
def attend(
    key_planes,
    value_planes,
    queries,
    pages,
    layer,
    head,
    start,
    stop,
    scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Attend to the tokens [start, stop), group after group; see `Format`."""
    query = query_operands(queries, scale, GROUP, PADDED, LAYOUT.head_dim, CONSTANTS)
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    PARTITIONS: tl.constexpr = HEAD_DIM // CONSTANTS.partition
    BLOCK: tl.constexpr = CONSTANTS.block
    WIDTH: tl.constexpr = CONSTANTS.width
    WORDS: tl.constexpr = WIDTH // 2
    COUNT: tl.constexpr = BLOCK // CONSTANTS.value_partition
    CODES: tl.constexpr = 16 // CONSTANTS.bits  # of a word
    token, byte = tl.arange(0, BLOCK), tl.arange(0, CONSTANTS.bytes)[None, :]
    word, channel = tl.arange(0, WORDS)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    rest = tl.zeros((HEAD_DIM, PADDED), tl.float32)
    sums = [tl.zeros((WORDS, PADDED), tl.float32) for _ in (0, 1, 2, 3, 4, 5, 6, 7)[:CODES]]
    for first in tl.range(start, stop, BLOCK, num_stages=STAGES):
        page = tl.load(pages + first // LAYOUT.page).to(tl.int64)
        tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
        tile = tile * LAYOUT.page + first % LAYOUT.page
        at = tile * WIDTH + token[:, None] * WIDTH + byte
        packed = tl.load(key_planes[0] + at, mask=byte < WIDTH, other=0)
        logits = logits_on_codes(
            packed, key_planes, tile, query, PADDED, PARTITIONS, INTERPRETED, CONSTANTS
        )
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=0))
        weights = tl.exp2(logits - largest[None, :])
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=0)
        weights = _weight_codes(weights, PADDED, COUNT, CONSTANTS)
        at = tile * WORDS + token[None, :] * WORDS + word
        words = tl.load(value_planes[0].to(tl.pointer_type(tl.uint16)) + at)
        partition = tile // CONSTANTS.value_partition + tl.arange(0, COUNT)[:, None]
        at = partition * HEAD_DIM + channel
        step = tl.load(value_planes[2] + at).to(tl.float32)
        rest = rest * decay[None, :] + _rest(
            words, value_planes, at, step, weights, COUNT, CONSTANTS
        )
        steps = _parts(step, COUNT, WORDS, CONSTANTS.bits)
        sums = [
            sums[i] * decay[None, :]
            + _weigh(words, steps[i], weights, i, PADDED, COUNT, INTERPRETED, CONSTANTS)
            for i in (0, 1, 2, 3, 4, 5, 6, 7)[:CODES]
        ]
    return (rest + _in_order(sums, PADDED, HEAD_DIM, CONSTANTS.bits),), largest, total
