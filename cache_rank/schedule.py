"""What travels between the ranks in a decode step, and when: message by message.

The layer groups of a step follow one another, and each message is of a boundary between two. There
are two schedules.

Predicted from earlier queries, as the group that was left has them: the answer is for the next
step.

    leave group g      up: q, k, v of g      down: selection of g for the next step

Forecast from the hidden state, with a lead of n groups: the answer is for this step, n groups
ahead. One more message, which nothing answers, brings the q, k and v of the last group.

    enter group b      up: q, k, v of b - 1, the hidden state that enters b
                       down: selection of b + n

The first n groups have nothing that far before them. They are served a step before, from the newest
true queries, when the last boundaries have no group left to serve. But with dense layers, what
enters the model is nearly far enough from the last of them:

    enter the model    up: the hidden state, which is the embedding of the token
                       down: selection of n - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MODEL = -1
"""In the place of a group that is entered: the model, with its dense layers."""


class Boundary(NamedTuple):
    """A message to the cache rank, and its answer.

    Attributes:
        left: the group whose queries, keys and values it carries; None carries none.
        entered: the group, or MODEL, whose input it carries, the hidden state; None carries none.
        answered: the group whose selection answers it; None has no answer.
        is_fresh: whether the answer is for the same step; it is for the next otherwise.
    """

    left: int | None
    entered: int | None
    answered: int | None
    is_fresh: bool


def by_history(groups: int) -> tuple[Boundary, ...]:
    """The boundaries of a step whose selections are for the next one."""
    return tuple(Boundary(group, None, group, False) for group in range(groups))


def by_forecast(groups: int, lead: int, early: bool = False) -> tuple[Boundary, ...]:
    """The boundaries of a step whose selections are for groups that lie `lead` ahead.

    Args:
        groups: layer groups, more than `lead`.
        lead: at least 1.
        early: whether the last group before the lead is forecast from what enters the model.
    """
    boundaries = [Boundary(None, MODEL, lead - 1, True)] if early else []
    for group in range(groups):
        left = group - 1 if group else None
        is_fresh = group + lead < groups
        answered = None if early and group == groups - 1 else (group + lead) % groups
        boundaries.append(Boundary(left, group, answered, is_fresh))
    return (*boundaries, Boundary(groups - 1, None, None, False))


def serves_early(dense_layers: int, layers_per_group: int, lead: int) -> bool:
    """Whether what enters the model is at most a layer less than the lead before some group.

    A layer less is enough: between two steps the cache rank has nothing to do.
    """
    return lead > 1 and dense_layers >= max(1, layers_per_group - 1)


def lanes_of_left(boundaries: Sequence[Boundary]) -> dict[int, int]:
    """Which message carries what a group has computed."""
    return {b.left: lane for lane, b in enumerate(boundaries) if b.left is not None}


def lanes_of_entered(boundaries: Sequence[Boundary]) -> dict[int, int]:
    """Which message carries the hidden state that enters a group, of groups where one does."""
    return {b.entered: lane for lane, b in enumerate(boundaries) if b.entered is not None}
