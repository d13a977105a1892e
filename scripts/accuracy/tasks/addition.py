"""Long addition with written carries.

Two numbers are given digit by digit, the least significant first, each digit behind the word of its
position; positions start at a random word and go around. The answer states each position, the digit
of the sum and the carry:

    prompt    s17 d4 s18 d9 s19 d3 plus s17 d8 s18 d0 s19 d1 go s17
    decode    s17 s17 d2 c1 s18 s18 s18 d0 c1 s19 s19 s19 d5 c0

A position needs two tokens, one of each number, and the carry, which stands a few words back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from scripts.accuracy.tasks.problem import Problem, Task, require
from scripts.accuracy.tasks.vocabulary import WALK, key_word, value_word

PLUS = "plus"
CARRIES = ("c0", "c1")


@dataclass(frozen=True)
class Addition(Problem):
    """One problem: two numbers, least significant digit first, and the word of their positions."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    positions: tuple[int, ...]
    restatements: int = 3

    @cached_property
    def prompt(self) -> str:
        """Both numbers, then the first position stated once."""
        return " ".join(
            [
                *self._words(self.first),
                PLUS,
                *self._words(self.second),
                WALK,
                key_word(self.positions[0]),
            ]
        )

    @cached_property
    def answer(self) -> tuple[str, ...]:
        """Each position restated, the digit of the sum, and the carry."""
        words: list[str] = []
        for position, digit, carry in self._sum:
            words += [key_word(position)] * self.restatements
            words += [value_word(digit), CARRIES[carry]]
        return tuple(words[1:])

    @cached_property
    def successor(self) -> Mapping[str, str]:
        """The digit of the sum at each position."""
        return {key_word(position): value_word(digit) for position, digit, _ in self._sum}

    @cached_property
    def _sum(self) -> list[tuple[int, int, int]]:
        found, carry = [], 0
        for position, one, other in zip(self.positions, self.first, self.second, strict=True):
            carry, digit = divmod(one + other + carry, 10)
            found.append((position, digit, carry))
        return found

    def _words(self, digits: tuple[int, ...]) -> list[str]:
        pairs = zip(self.positions, digits, strict=True)
        return [word for p, d in pairs for word in (key_word(p), value_word(d))]


def make_addition(seed: int, digits: int = 64, keys: int = 128, restatements: int = 3) -> Addition:
    """A deterministic problem: two random numbers of `digits` digits, leading zeros included.

    Raises:
        ValueError: a dial is out of range.
    """
    require(keys, "keys", 10)
    require(digits, "digits", 1, keys)
    require(restatements, "restatements", 1)
    rng = random.Random(seed)
    start = rng.randrange(keys)
    positions = tuple((start + i) % keys for i in range(digits))
    first, second = (tuple(rng.randrange(10) for _ in range(digits)) for _ in range(2))
    return Addition(first, second, positions, restatements)


TASK = Task(
    "addition",
    "a step that needs two distant tokens at once, which move on by one position at a time",
    make_addition,
    (PLUS, *CARRIES),
)
