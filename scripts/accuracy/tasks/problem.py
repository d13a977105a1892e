"""What tasks have in common: problems, which grade what was decoded, and walks through tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from scripts.accuracy.tasks.vocabulary import WALK, key_word, plain_words, value_word

Table = list[tuple[int, int]]
"""Pairs of a key and its value."""


class Grade(NamedTuple):
    """What a decode got right. A hop is one lookup: a word which follows from the word before."""

    correct_hops: int  # hops which follow from the word before them, also after a mistake
    correct_prefix_hops: int  # hops before the first wrong word
    hops: int  # hops of the whole answer
    exact: bool  # every word is right
    words: int  # words that were decoded


@dataclass(frozen=True)
class Problem:
    """A prompt whose continuation a program can check.

    The words carry no `<bos>`: the tokenizer adds it.

    Attributes:
        prompt: what the model is given, words separated by spaces.
        answer: the words to decode; of a problem with many right answers, one of them.
        successor: the word that a lookup finds, for every word which is looked up.
        sampling: parameters of the OpenAI API that the problem is decoded with.
    """

    prompt: str
    answer: tuple[str, ...]
    successor: Mapping[str, str]

    sampling: ClassVar[Mapping[str, float]] = {"temperature": 0.0}

    @property
    def determined(self) -> tuple[bool, ...]:
        """For each word of the answer, whether it follows from the words before it."""
        return (True,) * len(self.answer)

    @property
    def stated_words(self) -> int:
        """Words of prompt and answer before the first lookup: what a sparse cache must hold."""
        return len(self.prompt.split())

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
        words = text.split()[: self.max_tokens]
        pairs = enumerate(zip(words, self.answer, strict=False))
        matched = next((index for index, (word, right) in pairs if word != right), len(words))
        return Grade(
            correct_hops=min(sum(self._found(words)), self.hops),
            correct_prefix_hops=sum(self._found(self.answer[:matched])),
            hops=self.hops,
            exact=matched == self.max_tokens,
            words=len(words),
        )

    def _found(self, words: Sequence[str]) -> list[bool]:
        """For each word, whether a lookup of the word before it finds it."""
        before = [self.prompt.rsplit(maxsplit=1)[-1], *words]
        return [self.successor.get(b) == word for b, word in zip(before, words, strict=False)]


@dataclass(frozen=True)
class Task:
    """A family of problems.

    Attributes:
        name: its name on the command line.
        exposes: the failure of a KV cache that the task is there to show, in a sentence.
        make: makes the problem of a seed: `make(seed, **dials)`; raises ValueError for dials that
            no problem has. `keys` and `restatements` are dials of every task.
        markers: words of the task's own.
    """

    name: str
    exposes: str
    make: Callable[..., Problem]
    markers: tuple[str, ...] = ()

    def words(self, keys: int) -> list[str]:
        """All words, in the order of their token ids."""
        return [*plain_words(keys), *self.markers]


def fact_words(table: Table) -> list[str]:
    """Pairs of a key and its value, two words each."""
    return [word for key, value in table for word in (key_word(key), value_word(value))]


def fact_map(table: Table) -> dict[str, str]:
    """The word of each value, by the word of its key."""
    return {key_word(key): value_word(value) for key, value in table}


def draw_cycle(rng: random.Random, keys: int, facts: int) -> Table:
    """A table that leads through `facts` random keys of `keys` and back to the first."""
    cycle = rng.sample(range(keys), facts)
    return list(zip(cycle, cycle[1:] + cycle[:1], strict=True))


def walk(
    table: Table,
    start: int,
    hops: int,
    restatements: int,
    restarts: float = 0.0,
    rng: random.Random | None = None,
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Follow a table: each key stated `restatements` times, its value, then that value as the key.

    With a random number generator, the walk goes on from a random key after a value with the
    probability `restarts`. A model learns the lookup from walks which do, because it cannot guess
    their values by elimination.

    Returns:
        The words, from the first key, and whether each follows from the words before.
    """
    successor = dict(table)
    words: list[str] = []
    determined: list[bool] = []
    keys = list(successor)
    key, known = start, False
    for _ in range(hops):
        value = successor[key]
        words += [key_word(key)] * restatements + [value_word(value)]
        determined += [known] + [True] * restatements
        known = rng is None or rng.random() >= restarts
        key = value if known or rng is None else rng.choice(keys)
    return tuple(words), tuple(determined)


def make_walk(
    stated: Sequence[str], table: Table, start: int, hops: int, restatements: int
) -> Problem:
    """The problem to walk through a table that a prompt states, from a key on.

    The prompt ends with the start key stated once: the rest of the walk is the decode.
    """
    words, _ = walk(table, start, hops, restatements)
    return Problem(" ".join([*stated, WALK, words[0]]), words[1:], fact_map(table))


def require(**dials: tuple[float, float] | tuple[float, float, float]) -> None:
    """Raise ValueError if a dial, given as (least, value[, most]), is out of range."""
    for name, (low, value, *most) in dials.items():
        high = most[0] if most else float("inf")
        if not low <= value <= high:
            raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
