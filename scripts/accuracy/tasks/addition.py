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

from scripts.accuracy.tasks.problem import Problem, Task, fact_map, fact_words, require
from scripts.accuracy.tasks.vocabulary import WALK, key_word, value_word

PLUS = "plus"
CARRIES = ("c0", "c1")


def make_addition(seed: int, digits: int = 64, keys: int = 128, restatements: int = 3) -> Problem:
    """A deterministic problem: two random numbers of `digits` digits, leading zeros included.

    Raises:
        ValueError: a dial is out of range.
    """
    require(keys=(10, keys), digits=(1, digits, keys), restatements=(1, restatements))
    rng = random.Random(seed)
    start = rng.randrange(keys)
    positions = [(start + i) % keys for i in range(digits)]
    first, second = ([(position, rng.randrange(10)) for position in positions] for _ in range(2))
    table, words, carry = [], [], 0
    for (position, one), (_, other) in zip(first, second, strict=True):
        carry, digit = divmod(one + other + carry, 10)
        table.append((position, digit))
        words += [key_word(position)] * restatements + [value_word(digit), CARRIES[carry]]
    stated = [*fact_words(first), PLUS, *fact_words(second), WALK, words[0]]
    return Problem(" ".join(stated), tuple(words[1:]), fact_map(table))


TASK = Task(
    "addition",
    "a step that needs two distant tokens at once, which move on by one position at a time",
    make_addition,
    (PLUS, *CARRIES),
)
