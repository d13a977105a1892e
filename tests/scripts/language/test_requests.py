"""Requests to a language model: their length, what they hide, and how answers are graded."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.language.prompts import Reader
from scripts.language.tasks import GIVEN_WORDS, LIST_WORDS, TASKS, plain

pytestmark = pytest.mark.language_model


@pytest.fixture(scope="module")
def reader(language_model: Path) -> Reader:
    return Reader(str(language_model))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [300, 1024, 7168])
def test_a_prompt_has_its_length_and_is_the_same_again(
    reader: Reader, task: str, tokens: int
) -> None:
    first, second = (TASKS[task](reader, seed, tokens) for seed in (0, 1))
    assert len(first.prompt) == len(second.prompt) == tokens
    assert first.prompt != second.prompt
    assert TASKS[task](reader, 0, tokens) == first
    assert reader.text(first.prompt).rstrip().endswith("assistant")
    if first.problem is not None:
        assert len(first.opening) >= 24  # while attention becomes sparse
        assert len(first.opening) + first.max_tokens + tokens <= 8192


@pytest.mark.parametrize("seed", range(5))
def test_a_needle_is_where_its_depth_says(reader: Reader, seed: int) -> None:
    request = TASKS["needle"](reader, seed, 2048)
    text, problem = reader.text(request.prompt), request.problem
    assert problem is not None
    assert request.depth is not None
    (code,) = problem.answer
    assert text.count(code) == 1
    # The needle stands between paragraphs, of 207 tokens on average.
    assert text.index(code) / len(text) == pytest.approx(request.depth, abs=0.3)
    assert reader.text(request.opening).endswith(" is")
    assert problem.grade(plain(f' {code}."\n\nIs there more?')).exact
    assert not problem.grade(plain(f" {int(code) + 1}.")).exact
    assert not problem.grade(plain("")).exact


def test_a_list_is_graded_word_by_word(reader: Reader) -> None:
    request = TASKS["copy"](reader, 3, 1024)
    problem = request.problem
    assert problem is not None
    words = problem.answer
    assert len(words) == LIST_WORDS - GIVEN_WORDS == problem.hops
    assert ", ".join(words) in reader.text(request.prompt)
    assert problem.grade(plain(f" {', '.join(words)}.")).exact
    # A word that is left out costs itself and the one that follows, and ends the prefix.
    grade = problem.grade(plain(", ".join([*words[:5], *words[6:]])))
    assert (grade.correct_hops, grade.correct_prefix_hops) == (len(words) - 2, 5)
    assert problem.grade("").correct_hops == 0


def test_too_short_a_text_is_refused(reader: Reader) -> None:
    with pytest.raises(ValueError, match=r"opticks: has \d+ tokens, and \d+ are needed"):
        TASKS["needle"](reader, 0, 1_000_000)


def test_a_prompt_shorter_than_its_question_is_refused(reader: Reader) -> None:
    with pytest.raises(ValueError, match="tokens are too few"):
        TASKS["copy"](reader, 0, 40)
