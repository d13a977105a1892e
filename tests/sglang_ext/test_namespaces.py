"""Which requests have a part of SGLang's radix cache in common."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from fake_requests import fake_request

from sglang_ext.reuse import set_namespace

KEYS = (None, "tenant", " cache_rank: false", " weights 1", "cache rank [weights 1] tenant")


def namespace(key: str | None, dense: bool, sparse_tokens: bool, updates: int) -> str | None:
    custom = {"cache_rank": False} if dense else None
    params = SimpleNamespace(custom_params=custom)
    request = fake_request(req_pool_idx=None, extra_key=key, sampling_params=params)
    set_namespace(request, sparse_tokens, updates)
    found: str | None = request.extra_key
    return found


def test_no_client_can_name_the_part_of_another() -> None:
    asked = list(itertools.product(KEYS, (False, True), (0, 1, 2)))
    assert len({namespace(key, dense, True, updates) for key, dense, updates in asked}) == len(
        asked
    )


def test_nothing_is_kept_apart_without_a_reason() -> None:
    for key in KEYS[:-1]:
        assert namespace(key, dense=False, sparse_tokens=True, updates=0) == key
        assert namespace(key, dense=True, sparse_tokens=False, updates=0) == key
