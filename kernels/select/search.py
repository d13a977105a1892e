"""Thresholds by search: count what lies at or above two probes, keep a third of the interval."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def distance(low, high):
    """Unsigned, since it may be beyond the signed numbers."""
    unsigned: tl.constexpr = tl.uint64 if low.dtype == tl.int64 else tl.uint32
    return high.to(unsigned) - low.to(unsigned)


@triton.jit
def thirds(low, high):
    """The numbers that cut an interval, of more than one number, into three."""
    third = ((distance(low, high) + 2) // 3).to(low.dtype)
    return low + third, tl.minimum(high - third, low + third) + third


@triton.jit
def reaching(numbers, first, second):
    """Which of two probes each number reaches: two counters, to be summed."""
    field: tl.constexpr = numbers.dtype.primitive_bitwidth // 2
    reached = (numbers >= first).to(numbers.dtype)
    return reached + ((numbers >= second).to(numbers.dtype) << field)


@triton.jit
def narrow(low, high, first, second, reached, fewest, most):
    """One step of a search for a bound that `fewest` to `most` numbers lie at or above.

    `reached` is the sum of `reaching` over all numbers. Of the three parts of the interval the
    one with the bound is left, or nothing beside the bound when a part's end is one.
    """
    field: tl.constexpr = reached.dtype.primitive_bitwidth // 2
    by_first = reached & ((1 << field) - 1)
    by_second = (reached >> field) & ((1 << field) - 1)
    found = tl.where(by_second >= fewest, by_second, by_first)
    above = tl.where(by_second < fewest, second, high)
    above = tl.where(by_first < fewest, first, above)
    low = tl.where(by_first >= fewest, first, low)
    low = tl.where(by_second >= fewest, second, low)
    return low, tl.where((found >= fewest) & (found <= most), low, above)


@triton.jit
def search(vectors, low, high, fewest, most):
    """A bound that `fewest` to `most` of the numbers in the vectors, of int32, lie at or above.

    At least `fewest` lie at or above `low`, and fewer at or above `high`. Where ties allow no such
    bound, the highest that `fewest` reach.
    """
    while distance(low, high) > 1:
        first, second = thirds(low, high)
        reached = reaching(vectors[0], first, second)
        for index in tl.static_range(1, len(vectors)):
            reached += reaching(vectors[index], first, second)
        low, high = narrow(low, high, first, second, tl.sum(reached), fewest, most)
    return low


@triton.jit
def find_rank(keys, tokens, low, high, count):
    """Key and token of the rank that exactly `count` of those in the vectors reach."""
    key = search(keys, low, high, count, count)
    # Usually nothing shares the key, and every token reaches zero.
    sharing = tl.zeros_like(tokens[0])
    above = tl.zeros_like(tokens[0])
    for index in tl.static_range(len(keys)):
        sharing += (keys[index] == key).to(tl.int32)
        above += (keys[index] > key).to(tl.int32)
    sharing, above = tl.sum(sharing), tl.sum(above)
    token = tl.zeros_like(key)
    if above + sharing > count:
        newest = (tl.where(keys[0] == key, tokens[0], -1),)
        for index in tl.static_range(1, len(keys)):
            more = tl.where(keys[index] == key, tokens[index], -1)
            newest = newest + (more,)  # noqa: RUF005 - Triton unpacks no tuples
        token = search(newest, token, token + 0x7FFFFFFF, count - above, count - above)
    return key, token


@triton.jit
def reaches(keys, tokens, key, token):
    return (keys > key) | ((keys == key) & (tokens >= token))
