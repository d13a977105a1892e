"""The beginning of a text as a model reads it."""

from __future__ import annotations

from typing import Any

from sglang_ext.calibration.texts import LONGEST_TOKEN, Text


def first_tokens(tokenizer: Any, text: Text, count: int) -> list[int]:
    """The first tokens of a text.

    Raises:
        ValueError: the text is shorter, or cannot be read.
    """
    start = text.read()[: LONGEST_TOKEN * count]  # a book takes a minute
    ids: list[int] = tokenizer(start)["input_ids"]
    if len(ids) < count:
        raise ValueError(f"{text.name}: has {len(ids)} tokens, and {count} are needed")
    return ids[:count]
