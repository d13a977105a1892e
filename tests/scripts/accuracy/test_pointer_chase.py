"""Pointer chases: answers grade as right, wrong ones as wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.accuracy.pointer_chase import make_chain

seeds = st.integers(0, 2**32)


@given(seeds, st.data())
def test_a_changed_word_is_not_exact(seed: int, data: st.DataObject) -> None:
    chain = make_chain(seed, 20, 12)
    place = data.draw(st.integers(0, chain.max_tokens - 1))
    words = list(chain.answer)
    words[place] = "other"
    grade = chain.grade(" ".join(words))
    assert not grade.exact
    before = chain.grade(" ".join(chain.answer[:place])).correct_hops
    assert before <= grade.correct_hops <= chain.hops


def test_a_chain_reads_as_documented() -> None:
    chain = make_chain(seed=0, facts=3, hops=2)
    *facts, go, start = chain.prompt.split()
    assert go == "go"
    table = dict(zip(facts[::2], facts[1::2], strict=True))
    assert sorted(table) == sorted(value.replace("d", "s") for value in table.values())
    second = table[start].replace("d", "s")
    first, then = [start, start, table[start]], [second] * 3 + [table[second]]
    assert list(chain.answer) == first + then


def test_a_hop_counts_after_an_earlier_mistake() -> None:
    chain = make_chain(seed=0, facts=20, hops=5)
    words = list(chain.answer)
    words[2] = "d0" if words[2] != "d0" else "d1"  # the first value
    grade = chain.grade(" ".join(words))
    assert grade.correct_hops == 4


@given(seeds, st.integers(2, 30))
def test_a_lap_visits_every_key_once(seed: int, facts: int) -> None:
    chain = make_chain(seed, facts, facts)
    assert chain.grade(" ".join(chain.answer)) == (facts, True)
    assert chain.hops == facts
    values = [word for word in chain.answer if word.startswith("d")]
    assert len(set(values)) == facts
    assert values[-1] == chain.prompt.split()[-1].replace("s", "d")


@pytest.mark.parametrize("sizes", [(1, 1), (129, 1), (5, 0)])
def test_impossible_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        make_chain(0, *sizes)
