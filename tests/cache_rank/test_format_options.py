"""Options of residency formats: their defaults, in the code and in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cache_rank.residency import FORMATS
from cache_rank.residency.options import parse_options

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


@pytest.mark.parametrize("name", FORMATS)
def test_the_documented_defaults_are_those_of_the_code(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \| (.+=.+|none) \|$", GUIDE.read_text(), re.MULTILINE)
    documented = parse_options(",".join(re.findall(r"`(\w+=[^`]+)`", row)))
    assert documented == FORMATS[name].settings({})
    assert ("none" in row) == (not documented)


@pytest.mark.parametrize("name", FORMATS)
def test_defaults_are_accepted_and_give_way_to_what_is_given(name: str) -> None:
    options = FORMATS[name].options
    FORMATS[name].validate(FORMATS[name].settings({}))
    for option, values in options.items():
        found = FORMATS[name].settings({option: 7})
        assert found == {**{other: options[other].default for other in options}, option: 7}
        assert values.accepts(values.default)
