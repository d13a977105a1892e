"""The words of the tasks: one token a word.

`s17` is 17 as a key, where it is looked up; `d17` is 17 as a value, the result of a lookup: a fact
is found from its key and not from its value. Every task has these and `go`; some have markers of
their own, which a model that is trained for another task need not know.
"""

WALK = "go"
"""Ends what a prompt states and starts the answer."""

FILLERS = tuple(f"n{i}" for i in range(16))
"""Words that say nothing."""


def key_word(key: int) -> str:
    """The word which names `key` where it is looked up."""
    return f"s{key}"


def value_word(value: int) -> str:
    """The word which names `value` where it is the result of a lookup."""
    return f"d{value}"


def plain_words(keys: int) -> list[str]:
    """The words of every task, in the order of their token ids; keys are named from 0 on."""
    return [WALK, *map(key_word, range(keys)), *map(value_word, range(keys))]
