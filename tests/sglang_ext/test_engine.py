"""What the engine takes beside the arguments of a server."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.entrypoints import engine

import sglang_ext
from sglang_ext.server_args import BUNDLED_MODEL


def test_the_engine_takes_the_bundled_model_unless_given_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(engine.Engine, "__init__", lambda self, **kwargs: started.append(kwargs))
    monkeypatch.setattr(engine.Engine, "shutdown", lambda self: None)
    given: list[dict[str, Any]] = [
        {"disable_radix_cache": False},
        {"model_path": "/other"},
        {"server_args": object()},
    ]
    for arguments in given:
        sglang_ext.Engine(**arguments)
    assert started == [{"model_path": str(BUNDLED_MODEL), **given[0]}, *given[1:]]
