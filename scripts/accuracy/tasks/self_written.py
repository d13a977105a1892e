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

from scripts.accuracy.tasks.problem import Grade, Problem, Task, fact_words, require, walk
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
        words = tuple(text.split()[: self.max_tokens])
        table, walked = words[: 2 * self.keys], words[2 * self.keys + 1 :]
        values = _table(table)
        right = self._is_table(words)
        # A key is restated, then looked up; only then may the walk go on from another.
        found = prefix = 0
        unbroken = right
        size = self.restatements + 1
        for begin in range(0, len(walked), size):
            hop = walked[begin : begin + size]
            is_hop = len(hop) == size and len(set(hop[:-1])) == 1 and hop[0] in values
            is_found = len(hop) == size and values.get(hop[-2]) == hop[-1]
            found += is_found
            unbroken = unbroken and is_hop and is_found
            prefix += unbroken
        exact = prefix == self.length
        return Grade(min(found, self.length), prefix, self.length, exact, len(words))

    def _is_table(self, words: tuple[str, ...]) -> bool:
        """Whether a text begins with every key once, each with a value, and `go`."""
        stated, values = words[: 2 * self.keys : 2], words[1 : 2 * self.keys : 2]
        names = [key_word(key) for key in range(self.keys)]
        if len(words) <= 2 * self.keys or words[2 * self.keys] != WALK or stated[0] not in names:
            return False
        first = names.index(stated[0])
        allowed = {value_word(value) for value in range(self.keys)}
        return list(stated) == names[first:] + names[:first] and set(values) <= allowed


def _table(words: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=False))


def make_self_written(
    seed: int, hops: int, keys: int = 128, restatements: int = 3, restarts: float = 0.3
) -> SelfWritten:
    """A problem of a table of `keys` facts and a walk of `hops`.

    Raises:
        ValueError: a dial is out of range.
    """
    require(keys, "keys", 2)
    require(hops, "hops", 1)
    require(restatements, "restatements", 1)
    require(restarts, "restarts", 0.0, 1.0)
    rng = random.Random(seed)
    first = rng.randrange(keys)
    table = {key % keys: rng.randrange(keys) for key in range(first, first + keys)}
    facts = fact_words(table.items())
    walked = walk(table, rng.randrange(keys), hops, restatements, restarts, rng)
    # The first key is free; each later key follows from the one before, and values are free.
    known = (False, False, *[True, False] * (keys - 1), True, *walked.determined)
    answer = (*facts, WALK, *walked.words)
    return SelfWritten("", answer, _table(tuple(facts)), known, keys, hops, restatements)


TASK = Task(
    "self-written",
    "tokens that were decoded and not read from a prompt: how they are appended, shipped and "
    "encoded while the request runs",
    make_self_written,
)
