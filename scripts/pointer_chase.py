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
property of natural text.

Usage:

    chain = make_chain(seed=0, facts=128, hops=90)
    text = generate(chain.prompt, max_tokens=chain.max_tokens, temperature=0)
    grade = chain.grade(text)

The words carry no `<bos>`: the tokenizer adds it. Only the standard library is needed.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

WALK = "go"  # ends the facts and starts the walk


def key_word(key: int) -> str:
    """The word which names `key` where it is looked up."""
    return f"s{key}"


def value_word(value: int) -> str:
    """The word which names `value` where it is the result of a lookup."""
    return f"d{value}"


def task_words(keys: int) -> list[str]:
    """All words of the task, in the order of their token ids."""
    return [WALK, *map(key_word, range(keys)), *map(value_word, range(keys))]


class Grade(NamedTuple):
    """What a decode got right.

    `correct_hops` counts values which are the successor of the key stated just before them, also
    after an earlier mistake; `correct_prefix_hops` counts hops before the first wrong word; `exact`
    is true if every word is right.
    """

    correct_hops: int
    correct_prefix_hops: int
    exact: bool


@dataclass(frozen=True)
class PointerChase:
    """One problem: a table, the key to start from and the number of hops to walk."""

    facts: tuple[tuple[int, int], ...]  # (key, successor), in the order of the prompt
    start: int
    hops: int
    restatements: int = 3

    @cached_property
    def successor(self) -> dict[int, int]:
        """The table as a map."""
        return dict(self.facts)

    @property
    def fact_words(self) -> list[str]:
        """The prompt's table: two words a fact."""
        return [word for k, v in self.facts for word in (key_word(k), value_word(v))]

    @property
    def prompt(self) -> str:
        """The table, then the start key stated once: the rest of the walk is the decode."""
        return " ".join([*self.fact_words, WALK, key_word(self.start)])

    @cached_property
    def answer_words(self) -> tuple[str, ...]:
        """The decode: the start key's other restatements, its value, then every later hop whole."""
        words: list[str] = []
        key = self.start
        for _ in range(self.hops):
            words += [key_word(key)] * self.restatements
            key = self.successor[key]
            words.append(value_word(key))
        return tuple(words[1:])

    @property
    def max_tokens(self) -> int:
        """Length of the decode; a walk has no end of its own and is cut here."""
        return len(self.answer_words)

    @property
    def final_value(self) -> int:
        """The value of the last hop."""
        return int(self.answer_words[-1][1:])

    def grade(self, text: str) -> Grade:
        """Compare a decoded text, without the prompt and special tokens, with the answer."""
        words = text.split()[: self.max_tokens]
        matched = 0
        for word, expected in zip(words, self.answer_words, strict=False):
            if word != expected:
                break
            matched += 1
        values = {key_word(k): value_word(v) for k, v in self.facts}
        correct_hops = 0
        # A word can be the value of the word before it only if that word is a key.
        for before, word in zip([key_word(self.start), *words], words, strict=False):
            correct_hops += values.get(before) == word
        return Grade(
            correct_hops=min(correct_hops, self.hops),
            # The prompt holds the first word of the first hop.
            correct_prefix_hops=(matched + 1) // (self.restatements + 1),
            exact=matched == self.max_tokens,
        )


def make_chain(
    seed: int, facts: int, hops: int, keys: int = 128, restatements: int = 3
) -> PointerChase:
    """A deterministic problem: one cycle through `facts` of `keys` keys, stated in random order.

    `hops` may not exceed `facts`: within one lap no hop can be copied from an earlier hop.
    """
    if not 2 <= facts <= keys:
        raise ValueError(f"facts must be in [2, keys={keys}], got {facts}")
    if not 1 <= hops <= facts:
        raise ValueError(f"hops must be in [1, facts={facts}], got {hops}")
    if restatements < 1:
        raise ValueError(f"restatements must be at least 1, got {restatements}")
    rng = random.Random(seed)
    cycle = rng.sample(range(keys), facts)
    table = list(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    rng.shuffle(table)
    return PointerChase(tuple(table), cycle[0], hops, restatements)
