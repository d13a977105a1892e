"""Which regular expressions may end an answer: those that are cheap on whatever text there is.

SGLang's scheduler searches the end of every answer for `stop_regex` after each token, and all other
requests wait. Python's engine tries all ways in which a pattern may match. So the ways are counted.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
from collections.abc import Iterable
from typing import Any, NamedTuple

MOST_STEPS = 1000
"""What all patterns of a request may take, tried at one place of a text, in characters compared."""


class Effort(NamedTuple):
    """What a part of a pattern may take at most."""

    ways: int
    """In how many ways it may match."""

    steps: int
    """How many characters are compared until they have all been tried."""


class ExpensiveError(ValueError):
    """A pattern may take more than it is allowed."""


def refuse_patterns(patterns: str | list[str] | None) -> None:
    """Refuse patterns of `stop_regex` that are wrong, or that some text would make expensive.

    Raises:
        ValueError: says which one and why.
    """
    steps = 0
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        named = f"stop_regex {pattern!r:.80}"
        try:
            re.compile(pattern)
            steps += _in_sequence(_effort(*part) for part in sre_parser.parse(pattern)).steps
        except ExpensiveError as error:
            raise ValueError(f"{named}: {error}") from None
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{named} is not a regular expression: {error}") from None
        if steps > MOST_STEPS:
            raise ValueError(f"{named}: {_TOO_MUCH}")


_TOO_MUCH = (
    f"patterns may take {MOST_STEPS} steps at each place of a text, because all requests wait for "
    "them; use fewer and shorter repeats, and none in another"
)


def _in_sequence(parts: Iterable[Effort]) -> Effort:
    ways, steps = 1, 0
    for part in parts:
        steps += ways * part.steps
        ways *= part.ways
        if max(ways, steps) > MOST_STEPS:
            raise ExpensiveError(_TOO_MUCH)
    return Effort(ways, steps)


def _effort(kind: Any, value: Any) -> Effort:
    if kind in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY, sre.AT):
        return Effort(1, 1)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        return _repeated(*value)
    if kind is sre.BRANCH:
        branches = [_in_sequence(_effort(*part) for part in branch) for branch in value[1]]
        return Effort(sum(one.ways for one in branches), sum(one.steps for one in branches) + 1)
    if kind in (sre.SUBPATTERN, sre.ATOMIC_GROUP, sre.ASSERT, sre.ASSERT_NOT):
        inner = value if kind is sre.ATOMIC_GROUP else value[-1]
        return _in_sequence(_effort(*part) for part in inner)
    raise ExpensiveError("it refers to what it has matched, which takes too long on some texts")


def _repeated(least: int, most: int, parts: Any) -> Effort:
    if most is sre.MAXREPEAT:
        raise ExpensiveError(
            "a repeat needs an end, because all requests wait for it: write {0,20} in the place of "
            "*, {1,20} of +"
        )
    part = _in_sequence(_effort(*one) for one in parts)
    if most > MOST_STEPS:
        raise ExpensiveError(_TOO_MUCH)
    ways, steps, deep = 0, 0, 1  # deep: in how many ways so many repeats match
    for count in range(most + 1):
        ways += deep if count >= least else 0
        steps += deep * part.steps if count < most else 0
        deep *= part.ways
        if max(ways, steps) > MOST_STEPS:
            raise ExpensiveError(_TOO_MUCH)
    return Effort(ways, steps)
