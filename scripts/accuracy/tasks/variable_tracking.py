"""Variable tracking in the style of RULER (arXiv 2404.06654, section 3): chains of assignments.

Several chains of variables are assigned one from the other, as in a program: every assignment comes
after the one that it copies from, the chains are interleaved, and between the assignments stand
words that say nothing. `s17 d4` says that variable 17 is copied to variable 4. The answer
names all variables that a first one reaches, and says `end` after the last:

    prompt    s17 d4 n3 n9 n3 s8 d2 n0 s4 d88 n7 ... go s17
    decode    s17 s17 d4 s4 s4 s4 d88 s88 s88 s88 end

Variables are restated as in the pointer chase.
"""

from __future__ import annotations

import random
from itertools import pairwise

from scripts.accuracy.tasks.problem import Problem, Task, fact_map, fact_words, require, walk
from scripts.accuracy.tasks.vocabulary import FILLERS, WALK, key_word

END = "end"


def make_variables(
    seed: int,
    chains: int = 6,  # of which one is asked for
    hops: int = 16,  # assignments of a chain
    filler: int = 2,  # words between two assignments: their mean, of a uniform distribution from 0
    keys: int = 128,  # variables that there are
    restatements: int = 3,  # statements of each variable of the answer
) -> Problem:
    """A deterministic problem.

    Raises:
        ValueError: a dial is out of range.
    """
    require(chains=(1, chains, keys // (hops + 1)), hops=(1, hops))
    require(filler=(0, filler), restatements=(1, restatements))
    rng = random.Random(seed)
    variables = rng.sample(range(keys), chains * (hops + 1))
    members = [variables[i::chains] for i in range(chains)]
    turns = [chain for chain in range(chains) for _ in range(hops)]
    rng.shuffle(turns)
    remaining = [list(pairwise(m)) for m in members]
    stated: list[str] = []
    assignments = []
    for chain in turns:
        assignments.append(remaining[chain].pop(0))
        stated += fact_words(assignments[-1:])
        stated += rng.choices(FILLERS, k=rng.randrange(2 * filler + 1))
    first, last = members[0][0], key_word(members[0][-1])
    (_, *walked), _ = walk(assignments, first, hops, restatements)
    answer = (*walked, *[last] * restatements, END)
    prompt = " ".join([*stated, WALK, key_word(first)])
    return Problem(prompt, answer, {**fact_map(assignments), last: END})


TASK = Task(
    "variable-tracking",
    "a few tokens that count among many that do not, where a page holds one of them at most; and "
    "a lookup that must find nothing, where a poor selection still offers something",
    make_variables,
    (END, *FILLERS),
)
