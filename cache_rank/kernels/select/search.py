"""Thresholds by search, Triton: functions for kernels.

Each step counts how many numbers are at or above two probes, and keeps a third of the interval.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
