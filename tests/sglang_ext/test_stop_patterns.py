"""Stop patterns are refused that some text would make expensive."""

from __future__ import annotations

import re

import pytest

from sglang_ext.requests.patterns import refuse_patterns


@pytest.mark.parametrize(
    "patterns",
    [
        None,
        [],
        "",
        "END",
        r"(yes|no|maybe)[.!?]$",
        r".{0,200}x",
        r"(?<!a)b(?=c)",
        ["a", "b{2,3}"],
    ],
)
def test_cheap_patterns_pass(patterns: str | list[str] | None) -> None:
    refuse_patterns(patterns)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        *(
            (pattern, "a repeat needs an end")
            for pattern in (
                "(.+)+\0",
                "(a*)*b",
                "a*?b",
                "a*+b",
                "(?=a*)b",
            )
        ),
        *(
            (pattern, "may take 1000 steps")
            for pattern in (
                "(a{1,10}){1,10}b",
                "(a|a){30}b",
                "a{0,30}a{0,30}a{0,30}b",
                "(?:){999999}",
                "a{1,1000000000}",
                "(?=(a{0,40}){0,40})b",
            )
        ),
        *((pattern, "refers to what it has matched") for pattern in (r"(a)\1", "(a)?(?(1)b|c)")),
        *(
            (pattern, "is not a regular expression")
            for pattern in ("(", "[", "*", "(?<=a{1,2})b", "(" * 5000)
        ),
    ],
    ids=lambda given: given[:20],
)
def test_patterns_are_refused_that_could_stall_the_scheduler(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"stop_regex .*{re.escape(said)}"):
        refuse_patterns(["cheap", pattern])


def test_all_patterns_of_a_request_are_counted() -> None:
    refuse_patterns(["a{0,90}b"] * 3)
    with pytest.raises(ValueError, match="may take 1000 steps"):
        refuse_patterns(["a{0,90}b"] * 30)
