"""Requests of SGLang as our code reads them, for tests without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def fake_request(**attributes: Any) -> Any:
    """Make a request whose state in the pools is found wherever a release has it."""
    request = SimpleNamespace(cache_rank_weights=0, **attributes)
    request.kv = request
    return request
