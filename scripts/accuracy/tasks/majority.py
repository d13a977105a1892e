"""Pointer chase whose every value is a majority over scattered statements.

A key is stated `statements` times with its value and `rivals` times with one other value, all of
them in random order among those of the other keys. The walk is that of the pointer chase; the value
of a key is the one that was stated more often:

    prompt    s17 d4 s9 d88 s17 d4 s9 d51 s9 d88 s17 d30 ... go s9
    decode    s9 s9 d88 s88 s88 s88 d31 ...

All statements of a key look alike to a query, so that a selection smaller than their number takes
a sample of them, and the sample's majority need not be theirs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from scripts.accuracy.tasks.problem import Problem, Task, require, walk
from scripts.accuracy.tasks.vocabulary import WALK, key_word, value_word


@dataclass(frozen=True)
class Majority(Problem):
    """One problem: statements, the table of their majorities, and the walk."""

    statements: tuple[tuple[int, int], ...]  # (key, value), in the order of the prompt
    table: tuple[tuple[int, int], ...]  # (key, value stated most often)
    start: int
    length: int  # hops
    restatements: int = 3

    @cached_property
    def prompt(self) -> str:
        """The statements, then the start key stated once."""
        words = [word for k, v in self.statements for word in (key_word(k), value_word(v))]
        return " ".join([*words, WALK, key_word(self.start)])

    @cached_property
    def answer(self) -> tuple[str, ...]:
        """The walk through the majorities, but for its first word."""
        return walk(dict(self.table), self.start, self.length, self.restatements).words[1:]

    @cached_property
    def successor(self) -> Mapping[str, str]:
        """The majorities."""
        return {key_word(k): value_word(v) for k, v in self.table}


def make_majority(
    seed: int,
    facts: int = 16,
    hops: int = 16,
    statements: int = 16,
    rivals: int = 8,
    keys: int = 128,
    restatements: int = 3,
) -> Majority:
    """A deterministic problem: one cycle through `facts` of `keys` keys.

    Raises:
        ValueError: a dial is out of range.
    """
    require(facts, "facts", 2, keys)
    require(hops, "hops", 1)
    require(statements, "statements", 1)
    require(rivals, "rivals", 0, statements - 1)
    require(restatements, "restatements", 1)
    rng = random.Random(seed)
    cycle = rng.sample(range(keys), facts)
    table = tuple(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    stated: list[tuple[int, int]] = []
    for key, value in table:
        # A rival which is a key of the walk leads the walk astray instead of ending it.
        rival = rng.choice([other for other in cycle if other not in (key, value)] or [key])
        stated += [(key, value)] * statements + [(key, rival)] * rivals
    rng.shuffle(stated)
    return Majority(tuple(stated), table, cycle[0], hops, restatements)


TASK = Task(
    "majority",
    "attention that has to be spread: a budget below the number of statements sees a sample of "
    "them, and pages hold statements of other keys",
    make_majority,
)
