"""How far a text that a system wrote is from what dense decoding wrote, in plain measures."""

from __future__ import annotations

from collections.abc import Sequence


def first_difference(dense: Sequence[int], system: Sequence[int]) -> int | None:
    """The tokens before the first that differs; None if one text is the whole of the other.

    A text that ends earlier differs there, if the other was not cut at the same length.
    """
    for place, (expected, found) in enumerate(zip(dense, system, strict=False)):
        if expected != found:
            return place
    return None if len(dense) == len(system) else min(len(dense), len(system))


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """The share of n-grams of tokens that stood earlier in the same text, from 0 to 1.

    It is seq-rep-n of Welleck et al. (arXiv 1908.04319), 1 minus distinct over all n-grams. With
    n = 4, a text without loops has a few percent, and one that only loops nearly all.
    A text shorter than n has none.
    """
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
