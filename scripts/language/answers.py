"""What is recorded of the answers of a language model, and what is derived from them."""

from __future__ import annotations

import statistics as averages
from collections.abc import Sequence

import msgspec

from scripts.language.agreement import first_difference, repetition
from scripts.language.cells import by_system, with_budget
from scripts.language.runs import Run
from scripts.shared.systems import DENSE

Key = tuple[str, int, int]
"""A request: task, tokens of its prompt, seed."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a request.

    Attributes:
        task: name in TASKS.
        length: tokens of the prompt.
        seed: of the request.
        depth: where in the document the answer is, from 0 to 1; None if nowhere.
        system: label, without the budget.
        budget: k, tokens that each KV head selects; None for a system that selects none.
        opening: tokens that were decoded by force first.
        tokens: the answer, opening included.
        ended: whether the model ended it; it was cut otherwise.
        text: what follows the opening.
        sparse_from: tokens of the answer before the first that sparse attention predicted; None
            where all attention is dense.
        exact: whether all words are right; None where no program can tell.
        right, prefix, words: words that are right, those of them before the first mistake, and
            words of the right answer.
        late_steps, stale_steps: steps that waited for their selection, and that missed it.
    """

    task: str
    length: int
    seed: int
    depth: float | None
    system: str
    budget: int | None
    opening: int
    tokens: list[int]
    ended: bool
    text: str
    sparse_from: int | None
    exact: bool | None = None
    right: int = 0
    prefix: int = 0
    words: int = 0
    late_steps: int = 0
    stale_steps: int = 0

    @property
    def request(self) -> Key:
        """The request that it answers."""
        return self.task, self.length, self.seed

    @property
    def label(self) -> str:
        """The label of the system, with its budget."""
        return with_budget(self.system, self.budget).label

    @property
    def written(self) -> list[int]:
        """The tokens that the model wrote by itself."""
        return self.tokens[self.opening :]


class AnswerRun(Run, kw_only=True):
    """How answers came about.

    Attributes:
        lengths: of prompts, in tokens.
        problems: seeds of each task and length, from 0 on.
        opening: tokens of dense decoding's answers to questions that all others begin with.
        max_tokens: most tokens of an answer to a question.
        texts: hashes of the texts, by name.
    """

    lengths: list[int]
    problems: int
    opening: int
    max_tokens: int
    texts: dict[str, str]


class Agreement(msgspec.Struct, frozen=True):
    """The answers of a system to questions, beside those of dense decoding, request by request.

    Attributes:
        system, budget: as in Answer.
        same: for each request, tokens behind the opening before the first that differs from dense
            decoding's; None where none does.
        lengths, dense_lengths: tokens of the answers, openings included.
        ended, dense_ended: whether the model ended them.
        repetition, dense_repetition: of 4-grams, behind the opening.
    """

    system: str
    budget: int | None
    same: list[int | None]
    lengths: list[int]
    dense_lengths: list[int]
    ended: list[bool]
    dense_ended: list[bool]
    repetition: list[float]
    dense_repetition: list[float]

    @property
    def median_same(self) -> float | None:
        """The median of `same`; None if half of the answers or more have no difference."""
        median = averages.median(float("inf") if s is None else s for s in self.same)
        return None if median == float("inf") else median

    @property
    def ratios(self) -> list[float]:
        """Length over dense decoding's, of the requests where the model ended both answers."""
        whole = zip(self.lengths, self.dense_lengths, self.ended, self.dense_ended, strict=True)
        return [length / dense for length, dense, e, d in whole if e and d]


class AnswerReport(msgspec.Struct):
    """The content of `results.json`."""

    run: AnswerRun
    questions: list[Agreement]
    answers: list[Answer]


def agreements(answers: Sequence[Answer], task: str) -> list[Agreement]:
    """How the answers of each system to questions agree with dense decoding's."""
    dense = {a.request: a for a in answers if a.system == DENSE}
    found = []
    others = by_system(a for a in answers if a.task == task and a.system != DENSE)
    for (system, budget), there in others.items():
        pairs = [(a, dense[a.request]) for a in there]
        same = [first_difference(d.tokens[a.opening :], a.written) for a, d in pairs]
        found.append(
            Agreement(
                system,
                budget,
                same,
                [len(a.tokens) for a, _ in pairs],
                [len(d.tokens) for _, d in pairs],
                [a.ended for a, _ in pairs],
                [d.ended for _, d in pairs],
                [repetition(a.written) for a, _ in pairs],
                [repetition(d.tokens[a.opening :]) for a, d in pairs],
            )
        )
    return found
