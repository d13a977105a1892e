"""Many needles, several asked for: multi-key retrieval in the style of RULER.

A needle is a key and a value of several words; needles stand in random order among words that say
nothing. The prompt ends with the keys that are asked for, and the answer gives one value after the
other, each behind its key (arXiv 2404.06654, section 3, multi-key and multi-query needles):

    prompt    s17 d4 d61 d9 n3 n3 s8 d30 d2 d77 n0 ... ask s8 s17 ... go s8
    decode    s8 s8 d30 d2 d77 s17 s17 s17 d4 d61 d9 ...

No two words of the values are equal, so that each word of a value is found from the one before it.
"""

from __future__ import annotations

import random
from itertools import pairwise

from scripts.accuracy.tasks.problem import Problem, Task, require
from scripts.accuracy.tasks.vocabulary import FILLERS, WALK, key_word, value_word

ASK = "ask"


def make_needles(
    seed: int,
    needles: int = 24,  # stated in the prompt
    words: int = 4,  # of a value
    asked: int = 16,  # needles that are asked for
    filler: int = 4,  # words between two needles: their mean, of a uniform distribution from 0
    keys: int = 128,  # keys and values that there are
    restatements: int = 3,  # statements of each key of the answer
) -> Problem:
    """A deterministic problem.

    Raises:
        ValueError: a dial is out of range.
    """
    require(words=(1, words), filler=(0, filler), restatements=(1, restatements))
    require(needles=(1, needles, keys // words), asked=(1, asked, needles))
    rng = random.Random(seed)
    names = [key_word(name) for name in rng.sample(range(keys), needles)]
    drawn = [value_word(value) for value in rng.sample(range(keys), needles * words)]
    stated: list[str] = []
    values: dict[str, list[str]] = {}
    successor: dict[str, str] = {}
    for index, name in enumerate(names):
        values[name] = drawn[index * words : (index + 1) * words]
        successor.update(pairwise([name, *values[name]]))
        stated += [name, *values[name]]
        stated += rng.choices(FILLERS, k=rng.randrange(2 * filler + 1))
    wanted = rng.sample(names, asked)
    answer = [word for name in wanted for word in ([name] * restatements + values[name])]
    prompt = " ".join([*stated, ASK, *wanted, WALK, wanted[0]])
    return Problem(prompt, tuple(answer[1:]), successor)


TASK = Task(
    "needle",
    "a lookup whose next token changes at every step: the words of a value stand side by side, so "
    "that a page brings them all, and tokens chosen one by one have to keep up",
    make_needles,
    (ASK, *FILLERS),
)
