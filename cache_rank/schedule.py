"""What travels between the ranks in a decode step, and when: message by message.

The layer groups of a step follow one another, and each message is of a boundary between two. There
are two schedules.

Predicted from earlier queries, as the group that was left has them: the answer is for the next
step.

    leave group g      up: q, k, v of g      down: selection of g for the next step

Forecast from the hidden state, with a lead of n groups: the answer is for this step, n groups
ahead. For the last n boundaries no group is left to be served. They serve the first n groups of the
next step, from what enters the last groups if a projection is fitted to that, or else from the
newest true queries. One more message, which nothing answers, brings the q, k and v of the last
group.

    enter group b      up: q, k, v of b - 1, the hidden state that enters b
                       down: selection of b + n
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple


class Boundary(NamedTuple):
    """A message to the cache rank, and its answer.

    Attributes:
        left: the group whose queries, keys and values it carries; None carries none.
        entered: the group whose input it carries, the hidden state; None carries none.
        answered: the group whose selection answers it; None has no answer.
        is_fresh: whether the answer is for the same step; it is for the next otherwise.
    """

    left: int | None
    entered: int | None
    answered: int | None
    is_fresh: bool


@functools.cache
def by_history(groups: int) -> tuple[Boundary, ...]:
    """The boundaries of a step whose selections are for the next one."""
    return tuple(Boundary(group, None, group, False) for group in range(groups))


@functools.cache
def by_forecast(groups: int, lead: int) -> tuple[Boundary, ...]:
    """The boundaries of a step whose selections are for groups that lie `lead` ahead.

    Args:
        groups: layer groups, more than `lead`.
        lead: at least 1.
    """
    boundaries = []
    for group in range(groups):
        is_fresh = group + lead < groups
        answered = (group + lead) % groups
        boundaries.append(Boundary(group - 1 if group else None, group, answered, is_fresh))
    return (*boundaries, Boundary(groups - 1, None, None, False))


def lanes_of_left(boundaries: Sequence[Boundary]) -> dict[int, int]:
    """Which message carries what a group has computed."""
    return {b.left: lane for lane, b in enumerate(boundaries) if b.left is not None}


def lanes_of_entered(boundaries: Sequence[Boundary]) -> dict[int, int]:
    """Which message carries the hidden state that enters a group, of groups where one does."""
    return {b.entered: lane for lane, b in enumerate(boundaries) if b.entered is not None}
