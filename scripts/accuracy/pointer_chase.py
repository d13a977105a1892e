"""Restated pointer chase: a retrieval task whose every step a program can check.

A prompt states key-value pairs in random order; together they form one cycle over random keys. The
decode walks the cycle from a start key: each key is stated RESTATEMENTS times, then its value
follows, and the value becomes the next key. The words have two roles (`s17` is key 17, `d17` is the
value 17), so that a fact is found from its key and not from its value:

    prompt    s17 d4 s9 d88 ... go s9
    decode    s9 s9 d88 s88 s88 s88 d31 s31 ...

Each hop needs exactly one earlier token and no error can be recovered from, so that the fraction of
exact chains is the probability of a correct hop to the power of the number of hops: a sensitive
measure of what a sparse or compressed KV cache loses. Restating gives the lookup a query which
repeats itself, and so tolerates a selection up to RESTATEMENTS - 1 steps old. It is no evidence
about natural text.

The task descends from multi-query associative recall (Zoology, arXiv 2312.04927).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KEYS, RESTATEMENTS = 128, 3
"""What the bundled model is trained on."""

WALK = "go"
"""Ends what a prompt states and starts the answer."""


class Grade(NamedTuple):
    """What a decode got right. A hop is one lookup: a value which follows from the key before."""

    correct_hops: int  # hops which follow from the word before them, also after a mistake
    exact: bool  # every word is right


@dataclass(frozen=True)
class Problem:
    """A prompt whose continuation a program can check.

    The words carry no `<bos>`: the tokenizer adds it.
    """

    prompt: str  # words separated by spaces
    answer: tuple[str, ...]  # the words to decode
    successor: Mapping[str, str]  # what a lookup finds, for every word which is looked up

    @property
    def max_tokens(self) -> int:
        """Length of the decode; an answer has no end of its own and is cut here."""
        return len(self.answer)

    @property
    def hops(self) -> int:
        """Lookups of the answer."""
        return sum(self._found(self.answer))

    def grade(self, text: str) -> Grade:
        """Compare a decoded text, without the prompt and special tokens, with the answer."""
        words = tuple(text.split()[: self.max_tokens])
        return Grade(min(sum(self._found(words)), self.hops), words == self.answer)

    def _found(self, words: Sequence[str]) -> list[bool]:
        """For each word, whether a lookup of the word before it finds it."""
        before = [self.prompt.rsplit(maxsplit=1)[-1], *words]
        return [self.successor.get(b) == word for b, word in zip(before, words, strict=False)]


def make_chain(seed: int, facts: int, hops: int) -> Problem:
    """A deterministic problem: one cycle through `facts` of all keys, stated in random order.

    Within one lap, that is `hops` up to `facts`, no hop can be copied from an earlier hop.
    """
    if not 2 <= facts <= KEYS or hops < 1:
        raise ValueError(f"facts must be in [2, {KEYS}], hops at least 1; got {facts} and {hops}")
    rng = random.Random(seed)
    cycle = rng.sample(range(KEYS), facts)
    table = list(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    successor = dict(table)
    walked: list[str] = []
    key = start = cycle[0]
    for _ in range(hops):
        walked += [f"s{key}"] * RESTATEMENTS + [f"d{successor[key]}"]
        key = successor[key]
    rng.shuffle(table)
    stated = [word for key, value in table for word in (f"s{key}", f"d{value}")]
    # The prompt ends with the start key stated once: the rest of the walk is the decode.
    return Problem(
        " ".join([*stated, WALK, f"s{start}"]),
        tuple(walked[1:]),
        {f"s{key}": f"d{value}" for key, value in table},
    )
