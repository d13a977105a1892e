"""What HTTP bodies say of the cache rank, on every endpoint.

Some of SGLang's APIs drop fields that they do not know, so bodies are read before they are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

CACHE_RANK = "cache_rank"
"""The key of what is ours: in `custom_params`, `meta_info` and `/server_info`."""

_CUSTOM = "custom_params"

_HOLDERS = (_CUSTOM, "sampling_params", "parameters", "extra_body", "options")
"""The objects of bodies in which clients put parameters."""

_NAMED = re.compile(rb"cache[^a-z]{0,3}rank")

wish_of_body: ContextVar[bool | None] = ContextVar("wish_of_body", default=None)
"""What the body of the HTTP request being served asks for; None without a wish or a body."""


def is_misspelt(name: Any) -> bool:
    """Whether a key means to name what is ours, and does not."""
    letters = re.sub("[^a-z]", "", str(name).lower())
    return letters == "cacherank" and name != CACHE_RANK


def note_wish(body: bytes) -> None:
    """Note what a body asks of the cache rank.

    Raises:
        ValueError: it asks in a place or in words that would not be heeded.
    """
    wish_of_body.set(None)
    if not _NAMED.search(body.lower()):
        return
    try:
        said = json.loads(body)
    except ValueError:
        return  # not JSON, or a mistake of which SGLang will tell
    for place, name, value in _keys(said, ()):
        if name == CACHE_RANK and place and place[-1] == _CUSTOM:
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{_CUSTOM}.{CACHE_RANK} must be true or false, got {value!r:.80}")
            if "sampling_params" not in place:  # SGLang reads those, of each prompt of a batch
                wish_of_body.set(value)
        elif name == CACHE_RANK or is_misspelt(name):
            raise ValueError(
                f"{'.'.join((*place, name))} is not read; requests that are to stay dense say "
                f'"{_CUSTOM}": {{"{CACHE_RANK}": false}}'
            )


def _keys(said: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Go through the keys of parameters, with where they are."""
    for one in said if isinstance(said, list) else [said]:
        for name, value in one.items() if isinstance(one, dict) else ():
            yield place, name, value
            if name in _HOLDERS:
                yield from _keys(value, (*place, name))
