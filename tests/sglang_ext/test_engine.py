"""What the engine takes beside the arguments of a server."""

from __future__ import annotations

from typing import Any

import pytest
from parsed_args import parse

import sglang_ext
from sglang_ext.refusals import UnsupportedError
from sglang_ext.server_args import BUNDLED_MODEL

pytestmark = pytest.mark.usefixtures("parses_on_a_cpu")


def without_starting(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keep SGLang's engine from starting; what it would have been started with."""
    from sglang.srt.entrypoints.engine import Engine

    started: list[dict[str, Any]] = []
    monkeypatch.setattr(Engine, "__init__", lambda self, **kwargs: started.append(kwargs))
    monkeypatch.setattr(Engine, "shutdown", lambda self: None)
    return started


def test_the_engine_refuses_a_radix_cache_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started = without_starting(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"^disable_radix_cache=False: "):
        sglang_ext.Engine(cache_rank_gpus=1, inference_kv="working-set", disable_radix_cache=False)
    assert started == []


def test_the_engine_takes_the_bundled_model_unless_given_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = without_starting(monkeypatch)
    sglang_ext.Engine()
    sglang_ext.Engine(cache_rank_gpus=0, disable_radix_cache=False)
    sglang_ext.Engine(disable_radix_cache=False)
    sglang_ext.Engine(model_path="/other", disable_radix_cache=True)
    arguments = parse([])
    sglang_ext.Engine(server_args=arguments)
    assert started == [
        {"model_path": str(BUNDLED_MODEL)},
        {
            "model_path": str(BUNDLED_MODEL),
            "cache_rank_gpus": 0,
            "disable_radix_cache": False,
        },
        {"model_path": str(BUNDLED_MODEL), "disable_radix_cache": False},
        {"model_path": "/other", "disable_radix_cache": True},
        {"server_args": arguments},
    ]
