"""Every task: answers grade as right, wrong ones as wrong, and the words are those it declares."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.accuracy.tasks import TASKS
from scripts.accuracy.tasks.addition import make_addition
from scripts.accuracy.tasks.majority import make_majority
from scripts.accuracy.tasks.pointer_chase import make_chain
from scripts.accuracy.tasks.problem import Problem
from scripts.accuracy.tasks.self_written import make_self_written

DIALS: dict[str, dict[str, Any]] = {
    "pointer-chase": {"facts": 20, "hops": 12},
    "self-written": {"hops": 12, "keys": 24},
    "majority": {"facts": 6, "hops": 6, "statements": 5, "rivals": 4},
    "variable-tracking": {"chains": 3, "hops": 5},
    "needle": {"needles": 8, "words": 3, "asked": 5},
    "addition": {"digits": 12},
}
seeds = st.integers(0, 2**32)
statements = st.integers(1, 4)
names = st.sampled_from(sorted(TASKS))


def problem_of(name: str, seed: int, restatements: int) -> Problem:
    return TASKS[name].make(seed, restatements=restatements, **DIALS[name])


def test_every_task_is_tested() -> None:
    assert DIALS.keys() == TASKS.keys()


@given(names, seeds, statements)
def test_the_answer_is_exact(name: str, seed: int, restatements: int) -> None:
    problem = problem_of(name, seed, restatements)
    grade = problem.grade(" ".join(problem.answer))
    assert grade.exact
    assert grade.correct_hops == grade.correct_prefix_hops == grade.hops == problem.hops > 0
    assert grade.words == problem.max_tokens == len(problem.determined)


@given(names, seeds, statements)
def test_the_same_seed_makes_the_same_problem(name: str, seed: int, restatements: int) -> None:
    one, other = (problem_of(name, seed, restatements) for _ in range(2))
    assert (one.prompt, one.answer) == (other.prompt, other.answer)


@given(names, seeds, statements, st.data())
def test_a_changed_word_is_not_exact(
    name: str, seed: int, restatements: int, data: st.DataObject
) -> None:
    problem = problem_of(name, seed, restatements)
    places = [i for i, known in enumerate(problem.determined) if known]
    place = data.draw(st.sampled_from(places))
    words = list(problem.answer)
    words[place] = "n0"
    grade = problem.grade(" ".join(words))
    assert not grade.exact
    before = problem.grade(" ".join(problem.answer[:place])).correct_prefix_hops
    assert grade.correct_prefix_hops == before <= grade.correct_hops <= grade.hops


@given(names, seeds, statements, st.data())
def test_a_short_answer_is_not_exact(
    name: str, seed: int, restatements: int, data: st.DataObject
) -> None:
    problem = problem_of(name, seed, restatements)
    length = data.draw(st.integers(0, problem.max_tokens - 1))
    grade = problem.grade(" ".join(problem.answer[:length]))
    assert not grade.exact
    assert grade.words == length
    assert grade.correct_hops <= grade.hops


@given(names, seeds, statements)
def test_words_are_declared(name: str, seed: int, restatements: int) -> None:
    problem = problem_of(name, seed, restatements)
    declared = TASKS[name].words(DIALS[name].get("keys", 128))
    assert len(set(declared)) == len(declared)
    assert {*problem.prompt.split(), *problem.answer} <= set(declared)


@given(names, st.integers(0, 2**32 - 1))
def test_other_words_find_nothing(name: str, seed: int) -> None:
    """Words drawn from the vocabulary, as a model without the facts would write them."""
    problem = problem_of(name, seed, 3)
    source = random.Random(seed)
    words = source.choices(TASKS[name].words(128), k=problem.max_tokens)
    assert not problem.grade(" ".join(words)).exact


def test_a_chain_reads_as_documented() -> None:
    chain = make_chain(seed=0, facts=3, hops=2, keys=8, restatements=2, announced=True)
    *facts, announced, go, start = chain.prompt.split()
    assert (announced, go) == ("r2", "go")
    table = dict(zip(facts[::2], facts[1::2], strict=True))
    assert sorted(table) == sorted(value.replace("d", "s") for value in table.values())
    second = table[start].replace("d", "s")
    assert " ".join(chain.answer) == f"{start} {table[start]} {second} {second} {table[second]}"


def test_a_hop_counts_after_an_earlier_mistake() -> None:
    chain = make_chain(seed=0, facts=20, hops=5)
    words = list(chain.answer)
    words[2] = "d0" if words[2] != "d0" else "d1"  # the first value
    grade = chain.grade(" ".join(words))
    assert (grade.correct_hops, grade.correct_prefix_hops) == (4, 0)


@given(seeds, st.integers(2, 30), st.data())
def test_a_lap_visits_every_key_once(seed: int, facts: int, data: st.DataObject) -> None:
    chain = make_chain(seed, facts, facts)
    values = [word for word in chain.answer if word.startswith("d")]
    assert len(set(values)) == facts
    assert values[-1] == chain.prompt.split()[-1].replace("s", "d")


@given(seeds, st.integers(2, 9))
def test_the_majority_is_what_was_stated_most(seed: int, statements: int) -> None:
    problem = make_majority(seed, 5, 5, statements=statements, rivals=statements - 1)
    words = problem.prompt.split()[:-2]
    counted: dict[str, Counter[str]] = {}
    for key, value in zip(words[::2], words[1::2], strict=True):
        counted.setdefault(key, Counter())[value] += 1
    for key, values in counted.items():
        ((best, count), *others) = values.most_common()
        assert problem.successor[key] == best
        assert count == statements
        assert [number for _, number in others] == [statements - 1]


@given(seeds)
def test_addition_adds(seed: int) -> None:
    problem = make_addition(seed, digits=30)

    def number(words: Iterable[str], carry: int = 0) -> int:
        digits = [int(word[1:]) for word in words if word.startswith("d")]
        return sum(digit * 10**place for place, digit in enumerate([*digits, carry]))

    first, second = problem.prompt.split("plus")
    total = number(problem.answer, carry=int(problem.answer[-1][1:]))
    assert total == number(first.split()) + number(second.split())


class TestSelfWritten:
    def test_any_consistent_table_is_right(self) -> None:
        """Another problem's answer is as right: the table is the decode's own."""
        one, other = (make_self_written(seed, hops=9, keys=16) for seed in (1, 2))
        assert one.answer != other.answer
        assert one.grade(" ".join(other.answer)).exact

    def test_what_is_free_is_not_determined(self) -> None:
        problem = make_self_written(3, hops=20, keys=16, restarts=0.5)
        free = [
            word
            for word, known in zip(problem.answer, problem.determined, strict=True)
            if not known
        ]
        # The first key, all values of the table, the start of the walk and what it restarts at.
        assert len(free) > 1 + 16 + 1
        assert all(word[0] in "sd" for word in free)

    @pytest.mark.parametrize("place", [0, 4, 2 * 16])
    def test_a_broken_table_is_wrong(self, place: int) -> None:
        problem = make_self_written(3, hops=4, keys=16)
        words = list(problem.answer)
        words[place] = "d1"
        grade = problem.grade(" ".join(words))
        assert (grade.exact, grade.correct_prefix_hops) == (False, 0)


@pytest.mark.parametrize(
    ("name", "dials"),
    [
        ("pointer-chase", {"facts": 1, "hops": 1}),
        ("pointer-chase", {"facts": 129, "hops": 1}),
        ("pointer-chase", {"facts": 5, "hops": 0}),
        ("pointer-chase", {"facts": 5, "hops": 5, "restatements": 0}),
        ("self-written", {"hops": 5, "restarts": 1.5}),
        ("majority", {"statements": 4, "rivals": 4}),
        ("variable-tracking", {"chains": 20, "hops": 16}),
        ("needle", {"needles": 64, "words": 4}),
        ("needle", {"needles": 4, "asked": 5}),
        ("addition", {"digits": 129}),
    ],
)
def test_impossible_dials_are_refused(name: str, dials: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        TASKS[name].make(0, **dials)
