"""What travels between the ranks in a decode step, and when: message by message.

The layer groups of a step follow one another, and a message is sent between two of them. There are
two schedules.

Predicted from earlier queries, as the group that was left has them: the answer is for the next
step.

    leave group g      up: q, k, v of g      down: selection of g for the next step

Forecast from the hidden state, with a lead of n groups: the answer is for this step, n groups
ahead. The last n messages have no group of this step to select for. They serve the first n groups
of the next step, from what enters the last groups if a projection is fitted to that, or else from
the newest true queries. One more message, which nothing answers, brings the q, k and v of the last
group.

    enter group b      up: q, k, v of b - 1, the hidden state that enters b
                       down: selection of b + n
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple


class LayerMessage(NamedTuple):
    """A message to the cache rank, and its answer.

    Attributes:
        kv_of: the group whose queries, keys and values it carries; None carries none.
        hidden_of: the group whose input it carries, the hidden state; None carries none.
        selects_for: the group whose selection answers it; None has no answer.
        same_step: whether the answer is for the same step, and so *fresh*; it is for the next
            otherwise.
    """

    kv_of: int | None
    hidden_of: int | None
    selects_for: int | None
    same_step: bool


@functools.cache
def by_history(groups: int) -> tuple[LayerMessage, ...]:
    """The messages of a step whose selections are for the next one."""
    return tuple(LayerMessage(group, None, group, False) for group in range(groups))


@functools.cache
def by_forecast(groups: int, lead: int) -> tuple[LayerMessage, ...]:
    """The messages of a step whose selections are for groups that lie `lead` ahead.

    There are more groups than `lead`, which is at least 1.
    """
    layer_messages = []
    for group in range(groups):
        same_step = group + lead < groups
        selects_for = (group + lead) % groups
        kv_of = group - 1 if group else None
        layer_messages.append(LayerMessage(kv_of, group, selects_for, same_step))
    return (*layer_messages, LayerMessage(groups - 1, None, None, False))


def index_by_kv(layer_messages: Sequence[LayerMessage]) -> dict[int, int]:
    """The index of the message that carries the KV of a group, for each group."""
    return {
        message.kv_of: index
        for index, message in enumerate(layer_messages)
        if message.kv_of is not None
    }


def index_by_hidden(layer_messages: Sequence[LayerMessage]) -> dict[int, int]:
    """The index of the message that carries what enters a group, for groups where one does."""
    return {
        message.hidden_of: index
        for index, message in enumerate(layer_messages)
        if message.hidden_of is not None
    }
