"""Which requests have a part of SGLang's radix cache in common."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from sglang_ext.reuse import set_namespace

KEYS = (None, "tenant", " cache_rank: false", " weights 1", "cache rank [weights 1] tenant")


def namespace(key: str | None, dense: bool, sparse_tokens: bool, updates: int) -> str | None:
    custom = {"cache_rank": False} if dense else None
    request: Any = SimpleNamespace(
        extra_key=key, sampling_params=SimpleNamespace(custom_params=custom)
    )
    set_namespace(request, sparse_tokens, updates)
    return request.extra_key


def test_no_client_can_name_the_part_of_another() -> None:
    asked = list(itertools.product(KEYS, (False, True), (0, 1, 2)))
    assert len({namespace(key, dense, True, updates) for key, dense, updates in asked}) == len(
        asked
    )


def test_nothing_is_kept_apart_without_a_reason() -> None:
    for key in KEYS[:-1]:
        assert namespace(key, dense=False, sparse_tokens=True, updates=0) == key
        assert namespace(key, dense=True, sparse_tokens=False, updates=0) == key
