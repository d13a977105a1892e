"""The measures of what a system wrote, on examples made by hand."""

from __future__ import annotations

import pytest

from scripts.language.agreement import first_difference, repetition


@pytest.mark.parametrize(
    ("dense", "system", "same"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),  # ends earlier
        ([1, 2], [1, 2, 3], 2),  # ends later
        ([], [], None),
    ],
)
def test_first_difference(dense: list[int], system: list[int], same: int | None) -> None:
    assert first_difference(dense, system) == same


def test_repetition_is_the_share_of_grams_that_came_before() -> None:
    assert repetition([1, 2, 3, 4, 5, 6]) == 0
    # (1 2), (2 1), (1 2), (2 1): two of four stood before.
    assert repetition([1, 2, 1, 2, 1], n=2) == 0.5
    assert repetition([7] * 103) == pytest.approx(0.99)
    assert repetition([7, 7, 7]) == 0  # no 4-gram
