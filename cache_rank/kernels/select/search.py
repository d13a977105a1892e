"""Thresholds by search, and the keys that are searched, Triton: functions for kernels.

Each step counts how many numbers are at or above two probes, and keeps a third of the interval.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
"""The key of a token that does not compete."""

FLOOR = tl.constexpr(-(2**31) + 1)
"""The key of a NaN, the lowest of a token that competes."""

RESIDENT = tl.constexpr(-1)
"""The bits of the score of a token in a slot: a NaN that no arithmetic produces."""


@triton.jit
def order_keys(bits):
    """Map the bits of float32 scores to int32 keys in the order of the scores."""
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(bits == LOWEST, 0, keys)  # -0.0 equals 0.0
    keys = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, FLOOR, keys)
    return tl.where(bits == RESIDENT, LOWEST, keys)


@triton.jit
def load_keys(scores, token, mask):
    """Load the keys of tokens; those masked get `LOWEST`."""
    return order_keys(tl.load(scores + token, mask=mask, other=RESIDENT))


@triton.jit
def make_ranks(keys, token):
    """Unique int64 ranks by key, and then by token; see `rank_keys` of the reference."""
    return (keys.to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def distance(low, high):
    """How far apart the ends are: unsigned, since that may be beyond the signed numbers."""
    UNSIGNED: tl.constexpr = tl.uint64 if low.dtype == tl.int64 else tl.uint32
    return high.to(UNSIGNED) - low.to(UNSIGNED)


@triton.jit
def thirds(low, high):
    """The two probes that cut an interval of more than one number into three."""
    third = ((distance(low, high) + 2) // 3).to(low.dtype)
    return low + third, tl.minimum(high - third, low + third) + third


@triton.jit
def reaching(numbers, first, second):
    """Which of two probes each number reaches, as two counters in one number, to be summed."""
    FIELD: tl.constexpr = numbers.dtype.primitive_bitwidth // 2
    reached = (numbers >= first).to(numbers.dtype)
    return reached + ((numbers >= second).to(numbers.dtype) << FIELD)


@triton.jit
def sum_reaching(vectors, first, second):
    """The sum of `reaching` over all numbers of some vectors."""
    reached = reaching(vectors[0], first, second)
    for index in tl.static_range(1, len(vectors)):
        reached += reaching(vectors[index], first, second)
    return tl.sum(reached)


@triton.jit
def counts_of(reached):
    """How many numbers reach the first of two probes, and the second, from a sum of `reaching`."""
    FIELD: tl.constexpr = reached.dtype.primitive_bitwidth // 2
    return reached & ((1 << FIELD) - 1), (reached >> FIELD) & ((1 << FIELD) - 1)


@triton.jit
def narrow(low, high, first, second, reached, fewest, most):
    """Take one step of a search for a bound that `fewest` to `most` numbers reach.

    `reached` is the sum of `reaching` over all numbers. The third of the interval that has the
    bound is left; or the bound alone, where an end of a third is one.
    """
    by_first, by_second = counts_of(reached)
    found = tl.where(by_second >= fewest, by_second, by_first)
    above = tl.where(by_second < fewest, second, high)
    above = tl.where(by_first < fewest, first, above)
    low = tl.where(by_first >= fewest, first, low)
    low = tl.where(by_second >= fewest, second, low)
    return low, tl.where((found >= fewest) & (found <= most), low, above)


@triton.jit
def search(vectors, low, high, fewest, most):
    """Find a bound that `fewest` to `most` of the numbers in the vectors, int32, reach.

    At least `fewest` reach `low`, and fewer reach `high`. Where ties allow no such bound, it is the
    highest that `fewest` reach.
    """
    while distance(low, high) > 1:
        first, second = thirds(low, high)
        reached = sum_reaching(vectors, first, second)
        low, high = narrow(low, high, first, second, reached, fewest, most)
    return low


@triton.jit
def find_key_bound(maxima, slot_keys, highest, needed):
    """Find a key that at least `needed` tokens reach, and not many more."""
    lower, upper = maxima
    low = tl.full((), FLOOR, tl.int32)
    high = highest + 1
    # The lowest group is a better first guess than the middle of all numbers.
    lowest = tl.minimum(
        tl.where(lower > LOWEST, lower, highest), tl.where(upper > LOWEST, upper, highest)
    )
    guess = tl.maximum(tl.min(lowest), low)
    found = (lower >= guess).to(tl.int32) + (upper >= guess).to(tl.int32)
    found = tl.sum(found + (slot_keys >= guess).to(tl.int32))
    low = tl.where(found >= needed, guess, low)
    high = tl.where(found >= needed, high, guess)
    return search((lower, upper, slot_keys), low, high, needed, needed + needed // 16)


@triton.jit
def find_rank(keys, tokens, low, high, count):
    """Find the key and token that exactly `count` of the ranks in the vectors reach."""
    key = search(keys, low, high, count, count)
    # Usually nothing shares the key, and every token reaches zero.
    reached, above = counts_of(sum_reaching(keys, key, key + 1))
    token = tl.zeros_like(key)
    if reached > count:
        newest = (tl.where(keys[0] == key, tokens[0], -1),)
        for index in tl.static_range(1, len(keys)):
            more = tl.where(keys[index] == key, tokens[index], -1)
            newest = newest + (more,)  # noqa: RUF005 - Triton unpacks no tuples
        token = search(newest, token, token + 0x7FFFFFFF, count - above, count - above)
    return key, token


@triton.jit
def reaches(keys, tokens, key, token):
    """Whether ranks, by key and then by token, reach that of the given key and token."""
    return (keys > key) | ((keys == key) & (tokens >= token))


@triton.jit
def raise_bound(scores, start, stop, slot_ranks, low, high, fewest, WIDTH: tl.constexpr):
    """Find a bound that few enough tokens reach by reading the row again and again.

    This happens where very many tokens share a score, or the best share their groups.
    """
    while distance(low, high) > 1:
        first, second = thirds(low, high)
        reached = reaching(slot_ranks, first, second)
        for begin in range(0, stop, WIDTH):
            token = begin + tl.arange(0, WIDTH)
            keys = load_keys(scores, token, (token >= start) & (token < stop))
            reached += reaching(make_ranks(keys, token), first, second)
        low, high = narrow(low, high, first, second, tl.sum(reached), fewest, 2 * WIDTH)
    return low
