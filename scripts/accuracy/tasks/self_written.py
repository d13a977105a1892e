"""Pointer chase over facts that the model writes itself, by sampling.

The prompt is empty. The model states every key once, in ascending order from a random one on and
around, each with a random value; then it walks its own table, now and then going on from a random
key. Nothing is known beforehand, so the answer is checked against the table that it states:

    decode    s9 d88 s10 d3 ... s8 d51 go s31 s31 s31 d7 s7 s7 s7 d12 ...

Every token that a lookup needs was generated, as in a long chain of thought, while the pointer
chase reads a prompt: what is appended to the cache during decode is what counts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from scripts.accuracy.tasks.problem import Grade, Problem, Task, fact_map, fact_words, require, walk
from scripts.accuracy.tasks.vocabulary import WALK, key_word, value_word


@dataclass(frozen=True)
class SelfWritten(Problem):
    """One problem: the sizes, and one of the right answers.

    The prompt is empty, so that the tokenizer's `<bos>` is all that the model is given. Determined
    are the order of the keys, `go`, and what the walk looks up; not values, not restarts.
    """

    known: tuple[bool, ...]
    keys: int
    length: int  # hops
    restatements: int

    sampling: ClassVar[Mapping[str, float]] = {"temperature": 1.0, "top_p": 0.98}

    @property
    def determined(self) -> tuple[bool, ...]:
        return self.known

    @property
    def stated_words(self) -> int:
        """The table, which is part of the answer, and `go`."""
        return 2 * self.keys + 1

    @property
    def hops(self) -> int:
        """Values of the walk."""
        return self.length

    def grade(self, text: str) -> Grade:
        """Check a decoded text against its own table.

        Exact is a table with every key once, in order, and a whole walk which follows it.
        """
        words = text.split()[: self.max_tokens]
        stated, found, go = words[: 2 * self.keys : 2], words[1 : 2 * self.keys : 2], 2 * self.keys
        names = [key_word(key) for key in range(self.keys)]
        first = names.index(stated[0]) if stated and stated[0] in names else 0
        unbroken = (
            words[go : go + 1] == [WALK]
            and stated == names[first:] + names[:first]
            and {*found} <= {value_word(value) for value in range(self.keys)}
        )
        values = dict(zip(stated, found, strict=False))
        right = prefix = 0
        # A key is restated, then looked up; only then may the walk go on from another.
        for begin in range(go + 1, len(words), self.restatements + 1):
            *keys, value = words[begin : begin + self.restatements + 1]
            is_found = len(keys) == self.restatements and values.get(keys[-1]) == value
            unbroken = unbroken and is_found and len(set(keys)) == 1
            right += is_found
            prefix += unbroken
        exact = prefix == self.length
        return Grade(min(right, self.length), prefix, self.length, exact, len(words))


def make_self_written(
    seed: int, hops: int, keys: int = 128, restatements: int = 3, restarts: float = 0.3
) -> SelfWritten:
    """A problem of a table of `keys` facts and a walk of `hops`.

    Raises:
        ValueError: a dial is out of range.
    """
    require(keys=(2, keys), hops=(1, hops), restatements=(1, restatements))
    require(restarts=(0.0, restarts, 1.0))
    rng = random.Random(seed)
    first = rng.randrange(keys)
    table = [(key % keys, rng.randrange(keys)) for key in range(first, first + keys)]
    walked, determined = walk(table, rng.randrange(keys), hops, restatements, restarts, rng)
    # The first key is free; each later key follows from the one before, and values are free.
    known = (False, False, *[True, False] * (keys - 1), True, *determined)
    answer = (*fact_words(table), WALK, *walked)
    return SelfWritten("", answer, fact_map(table), known, keys, hops, restatements)


TASK = Task(
    "self-written",
    "tokens that were decoded and not read from a prompt: how they are appended, shipped and "
    "encoded while the request runs",
    make_self_written,
)
