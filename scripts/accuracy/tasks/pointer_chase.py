"""Restated pointer chase: a retrieval task whose every step a program can check.

A prompt states key-value pairs in random order; together they form one cycle over random keys. The
decode walks the cycle from a start key: each key is stated `restatements` times, then its value
follows, and the value becomes the next key. The words have two roles (`s17` is key 17, `d17` is the
value 17), so that a fact is found from its key and not from its value:

    prompt    s17 d4 s9 d88 ... go s9
    decode    s9 s9 d88 s88 s88 s88 d31 s31 ...

Each hop needs exactly one earlier token and no error can be recovered from, so that the fraction of
exact chains is the probability of a correct hop to the power of the number of hops: a sensitive
measure of what a sparse or compressed KV cache loses. Restating gives the lookup a query which
repeats itself, and so tolerates a selection up to `restatements - 1` steps old; it is a dial, not a
property of natural text. With one statement, the step which looks up is the first to have the key:
a selection from earlier queries has only the value before, which names the same number, to go by.

The task descends from multi-query associative recall (Zoology, arXiv 2312.04927).
"""

from __future__ import annotations

import random

from scripts.accuracy.tasks.problem import Problem, Task, draw_cycle, fact_words, make_walk, require

MOST_ANNOUNCED = 8


def restatements_word(restatements: int) -> str:
    """The word which says how often each key of the walk is stated."""
    return f"r{restatements}"


def make_chain(
    seed: int,
    facts: int,
    hops: int,
    keys: int = 128,
    restatements: int = 3,
    announced: bool = False,
) -> Problem:
    """A deterministic problem: one cycle through `facts` of `keys` keys, stated in random order.

    Within one lap, that is `hops` up to `facts`, no hop can be copied from an earlier hop.

    Raises:
        ValueError: a dial is out of range.
    """
    most = MOST_ANNOUNCED if announced else float("inf")
    require(facts=(2, facts, keys), hops=(1, hops), restatements=(1, restatements, most))
    rng = random.Random(seed)
    table = draw_cycle(rng, keys, facts)
    start = table[0][0]
    rng.shuffle(table)
    announcement = [restatements_word(restatements)] if announced else []
    return make_walk([*fact_words(table), *announcement], table, start, hops, restatements)


TASK = Task(
    "pointer-chase",
    "a lookup that misses its one token, or comes too late for it: r statements of a key allow a "
    "selection that is r - 1 steps old, and r = 1 is adversarial to predicting a step ahead",
    make_chain,
    tuple(restatements_word(r) for r in range(1, MOST_ANNOUNCED + 1)),
)
