"""Attention over HACK codes where they lie (HACK sections 5.2-5.3), Triton.

Weights of the tokens of a partition of values get 8-bit codes, and are multiplied with the codes of
values. These products, of whole numbers in float16, are exact. Bytes would have to be transposed
for products of integers; words of 16 bits the matrix unit takes as they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cache_rank.kernels.coded.format import Launch, Parameters
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.rounding import nearest_integers
from cache_rank.kernels.coded.tokens import place_in_pages
from cache_rank.kernels.hack.queries import Constants, logits_on_codes, query_operands
from cache_rank.kernels.hack.reference import GROUP, HackCodec
from cache_rank.kernels.nibbles.triton import code_as_half, parts_of_words


def attending(tokens: CodedTokens, padded: int) -> Parameters:
    """See `Format`. Partitions of values have GROUP tokens, and the sums of their codes."""
    (keys, values), head_dim = tokens.codecs, tokens.rings[0].shape[-1]
    assert isinstance(keys, HackCodec)
    assert isinstance(values, HackCodec)
    assert values.partition == GROUP
    assert values.sums_anew == keys.sums_anew
    assert values.value_sums or values.sums_anew
    launch = Launch(warps=2, programs=4) if padded <= 8 else Launch(warps=4)
    return Parameters((), Constants.of(keys, head_dim, padded), launch)


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
    BITS: tl.constexpr = CONSTANTS.bits
    WIDTH: tl.constexpr = CONSTANTS.width
    WORDS: tl.constexpr = WIDTH // 2
    token, byte = tl.arange(0, BLOCK), tl.arange(0, CONSTANTS.bytes)[None, :]
    word, dims = tl.arange(0, WORDS)[:, None], tl.arange(0, HEAD_DIM)
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    rest = tl.zeros((PADDED, HEAD_DIM), tl.float32)
    sums = [tl.zeros((WORDS, PADDED), tl.float32) for _ in (0, 1, 2, 3, 4, 5, 6, 7)[: 16 // BITS]]
    for first in tl.range(start, stop, BLOCK, num_stages=STAGES):
        tile = place_in_pages(pages, first, layer, head, LAYOUT)
        at = tile * WIDTH + token[:, None] * WIDTH + byte
        packed = tl.load(key_planes[0] + at, mask=byte < WIDTH, other=0)
        logits = logits_on_codes(
            packed, key_planes, tile, query, PADDED, PARTITIONS, INTERPRETED, CONSTANTS
        )
        if LAYOUT.unfinished:
            logits = tl.where((first + token < stop)[:, None], logits, -1e30)
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=0))
        weights = tl.exp2(logits - largest[None, :])
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=0)
        # Weights in 8 bits; where they are too small to add anything, all codes are 0.
        minimum = tl.min(weights, axis=0)
        step = (tl.max(weights, axis=0) - minimum) * (1.0 / 255.0)
        inverse = tl.where(step < 1e-30, 0.0, 1.0 / tl.maximum(step, 1e-30))
        codes = nearest_integers((weights - minimum[None, :]) * inverse[None, :])
        # Σ p v = s_p s_v Σ p'v' + rest, where `code_as_half` adds 64 to each v'.
        of_codes = step * tl.sum(codes, axis=0)
        at = tile // BLOCK * HEAD_DIM + dims
        value_minimum = tl.load(value_planes[1] + at).to(tl.float32)
        value_step = tl.load(value_planes[2] + at).to(tl.float32)
        if CONSTANTS.sums_anew:
            value_sum = tl.zeros((HEAD_DIM,), tl.float32)  # its share is added below
        else:
            value_sum = tl.load(value_planes[3] + at).to(tl.float32)
        rest = (
            rest * decay[:, None] + value_minimum[None, :] * (of_codes + BLOCK * minimum)[:, None]
        )
        of_sums = value_sum[None, :] * minimum[:, None] - 64.0 * of_codes[:, None]
        rest += value_step[None, :] * of_sums
        steps = parts_of_words(value_step[None, :], 1, BITS)  # (1, words) each
        at = tile * WORDS + token[None, :] * WORDS + word
        words = tl.load(value_planes[0].to(tl.pointer_type(tl.uint16)) + at)
        codes = codes.to(tl.float16)
        sums = [
            sums[i] * decay[None, :]
            + tl.dot(code_as_half(words, i, BITS, INTERPRETED), codes)
            * (tl.trans(steps[i]) * step[None, :])
            for i in (0, 1, 2, 3, 4, 5, 6, 7)[: 16 // BITS]
        ]
        if CONSTANTS.sums_anew:
            # Σv' of all tokens, less what `code_as_half` adds to them, by products with ones.
            ones = tl.full((BLOCK, PADDED), 1.0, tl.float16)
            sums = [
                sums[i]
                + (tl.dot(code_as_half(words, i, BITS, INTERPRETED), ones) - 64.0 * BLOCK)
                * (tl.trans(steps[i]) * minimum[None, :])
                for i in (0, 1, 2, 3, 4, 5, 6, 7)[: 16 // BITS]
            ]
    rests = parts_of_words(rest, PADDED, BITS)
    sums = [sums[i] + tl.trans(rests[i]) for i in (0, 1, 2, 3, 4, 5, 6, 7)[: 16 // BITS]]
    return sums, largest, total
