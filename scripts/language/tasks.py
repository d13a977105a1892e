"""Requests to a language model: questions that it answers freely, and two that a program checks.

    request = TASKS["needle"](reader, seed=0, tokens=4096)
    request.prompt, request.opening, request.max_tokens
    request.problem.grade(plain(text))

The tasks of scripts.accuracy.tasks have a token a word and are of models that were trained for
them. These are in the words of a language model: a prompt has exactly as many tokens as are asked
for, of which most are a natural text. Where a program checks the answer, it begins with words that
are not the model's: they are decoded by force, so that attention is sparse when the lookup comes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from scripts.accuracy.tasks import Problem
from scripts.language.prompts import Reader, joined
from sglang_ext.calibration.texts import TEXTS

GOLDEN = 0.6180339887
"""Multiples of it, less their whole part, fill [0, 1) evenly however many there are."""


class Request(NamedTuple):
    """What a model is asked.

    Attributes:
        prompt: its tokens.
        opening: tokens that the answer begins with, decoded by force. None of them counts.
        max_tokens: most tokens of the answer behind the opening.
        depth: where in the document the answer is, from 0 to 1; None if nowhere.
        problem: grades the answer; None if no program can.
    """

    prompt: list[int]
    opening: list[int]
    max_tokens: int
    depth: float | None = None
    problem: Problem | None = None


def plain(text: str) -> str:
    """A text as words, without punctuation, for Problem.grade."""
    return re.sub(r"[^\w\s]+", " ", text).lower()


QUESTIONS = (
    "Summarize this document in three paragraphs.",
    "Explain to a beginner what this document is about, and give examples from it.",
    "List the ten most important points of this document, and explain each in a sentence.",
    "Write a letter to a friend in which you describe what this document says.",
)


def make_question(reader: Reader, seed: int, tokens: int, max_tokens: int = 384) -> Request:
    """A question about a text that has no one right answer; seeds go through texts, then questions.

    Raises:
        ValueError: the text is too short, or the length.
    """
    text = list(TEXTS.values())[seed % len(TEXTS)]
    question = QUESTIONS[(seed + seed // len(TEXTS)) % len(QUESTIONS)]
    head, tail = reader.ask("Here is a document:\n\n", f"\n\n{question}")
    document = reader.beginning(text, _room(tokens, head, tail))
    return Request(head + document + tail, [], max_tokens)


HAYSTACK = TEXTS["opticks"]
"""The prose among the texts: needles stand between paragraphs."""

NAMES = (
    *("Alice", "Bruno", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Irene", "Jacob"),
    *("Karen", "Louis", "Maria", "Nathan", "Olivia", "Peter"),
)

NEEDLE_OPENING = (
    "I have read the whole document from the first line to the last. The sentence that states it "
    'is: "The secret code of {name} is'
)

SLACK = 8
"""An answer that a program checks may have so many tokens more than the right one."""


def make_needle(reader: Reader, seed: int, tokens: int) -> Request:
    """A sentence with a code of five digits, somewhere in a text; it is asked for at the end.

    Raises:
        ValueError: the text is too short, or the length.
    """
    rng = random.Random(seed)
    name, code = rng.choice(NAMES), str(rng.randrange(10_000, 100_000))
    hidden = f"The secret code of {name} is {code}."
    question = f"What is the secret code of {name} that this document states?"
    prompt, depth = _hide(reader, hidden, question, seed, tokens, rng)
    opening = NEEDLE_OPENING.format(name=name)
    return Request(
        prompt,
        reader.tokens(opening),
        len(reader.tokens(f" {code}")) + SLACK,
        depth,
        Problem(plain(opening), (code,), {"is": code}),
    )


LIST_WORDS = 20
GIVEN_WORDS = 4
GOODS = (
    "apple bread bridge butter candle castle chair cheese clock cloud coffee dragon eagle engine "
    "farmer feather flower forest garden guitar hammer honey horse island jacket kitchen ladder "
    "lemon lion market mirror monkey mountain needle orange paper pencil piano pillow pocket "
    "potato rabbit ribbon river rocket saddle salt school ship silver spider stone sugar table "
    "tiger tomato tower train tree turtle village violin wagon window winter wolf"
).split()
COPY_OPENING = (
    "I repeat the shopping list from the document, word for word and in the same order:\n\n"
    "Shopping list: {given},"
)


def make_copy(reader: Reader, seed: int, tokens: int) -> Request:
    """A list of LIST_WORDS words, somewhere in a text; it is asked for at the end.

    The opening gives the first GIVEN_WORDS words. Each of the others follows from the one before.

    Raises:
        ValueError: the text is too short, or the length.
    """
    rng = random.Random(seed)
    words = rng.sample(GOODS, LIST_WORDS)
    listed = f"Shopping list: {', '.join(words)}."
    question = "The document has a shopping list. Repeat the shopping list word for word."
    prompt, depth = _hide(reader, listed, question, seed, tokens, rng)
    given, answer = words[:GIVEN_WORDS], words[GIVEN_WORDS:]
    opening = COPY_OPENING.format(given=", ".join(given))
    return Request(
        prompt,
        reader.tokens(opening),
        len(reader.tokens(f" {', '.join(answer)}.")) + SLACK,
        depth,
        Problem(plain(opening), tuple(answer), dict(pairwise(words))),
    )


def _hide(
    reader: Reader, hidden: str, question: str, seed: int, tokens: int, rng: random.Random
) -> tuple[list[int], float]:
    """A prompt with a paragraph hidden in a text, and its depth, which seeds spread evenly."""
    depth = seed * GOLDEN % 1
    head, tail = reader.ask("Here is a document:\n\n", f"\n\n{question}")
    paragraph = reader.tokens(f"{hidden}\n\n")
    room = _room(tokens, head, paragraph, tail)
    document = reader.passage(HAYSTACK, room, rng)
    document.insert(_paragraph_at(document, depth * room), paragraph)
    return head + joined(document) + tail, depth


def _room(tokens: int, *parts: list[int]) -> int:
    """The tokens that are left for a document."""
    others = sum(map(len, parts))
    if others >= tokens:
        raise ValueError(f"{tokens} tokens are too few: the question alone has {others}")
    return tokens - others


def _paragraph_at(document: list[list[int]], tokens: float) -> int:
    """The paragraph before which there are about so many tokens."""
    before, best = 0, (float("inf"), 0)
    for index, paragraph in enumerate(document):
        best = min(best, (abs(before - tokens), index))
        before += len(paragraph)
    return best[1]


QUESTION = "question"

TASKS: dict[str, Callable[[Reader, int, int], Request]] = {
    QUESTION: make_question,
    "needle": make_needle,
    "copy": make_copy,
}
"""Each makes the request of a seed with a prompt of so many tokens."""
