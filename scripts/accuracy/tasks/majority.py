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

from scripts.accuracy.tasks.problem import Problem, Task, draw_cycle, fact_words, make_walk, require


def make_majority(
    seed: int,
    facts: int = 16,
    hops: int = 16,
    statements: int = 16,
    rivals: int = 8,
    keys: int = 128,
    restatements: int = 3,
) -> Problem:
    """A deterministic problem: one cycle through `facts` of `keys` keys.

    Raises:
        ValueError: a dial is out of range.
    """
    require(facts=(2, facts, keys), hops=(1, hops), restatements=(1, restatements))
    require(statements=(1, statements), rivals=(0, rivals, statements - 1))
    rng = random.Random(seed)
    table = draw_cycle(rng, keys, facts)
    stated: list[tuple[int, int]] = []
    for key, value in table:
        # A rival which is a key of the walk leads the walk astray instead of ending it.
        rival = rng.choice([other for other, _ in table if other not in (key, value)] or [key])
        stated += [(key, value)] * statements + [(key, rival)] * rivals
    rng.shuffle(stated)
    return make_walk(fact_words(stated), table, table[0][0], hops, restatements)


TASK = Task(
    "majority",
    "attention that has to be spread: a budget below the number of statements sees a sample of "
    "them, and pages hold statements of other keys",
    make_majority,
)
