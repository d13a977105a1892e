"""The servers that labels name; every preset is one that the server's arguments accept."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from scripts.accuracy.presets import PRESETS
from scripts.accuracy.settings import (
    POLICY,
    attended_tokens,
    evaluated_system,
    policy_of,
    system_flags,
)
from scripts.accuracy.tasks import TASKS
from scripts.shared.systems import DECODE_MODES, System


@pytest.fixture
def quiet() -> Iterator[None]:
    """Parsing sets up logging and the environment: leave them as they were."""
    environment, handlers, level = dict(os.environ), logging.root.handlers, logging.root.level
    logging.root.handlers = []
    yield
    logging.root.handlers, logging.root.level = handlers, level
    os.environ.clear()
    os.environ.update(environment)


def test_a_label_changes_the_policy() -> None:
    system = System.parse("cache-rank:query_predictor=ridge,sparse_budget=7")
    policy = policy_of(system, {"sparse_budget": 9, "sink_tokens": 3})
    assert (policy["sparse_budget"], policy["sink_tokens"]) == (7, 3)
    assert policy["delta_capacity"] == 7
    assert policy["recent_tokens"] == POLICY["recent_tokens"]


@pytest.mark.parametrize("label", ["floor", "cache-step", "two-fp8"])
def test_a_system_that_answers_no_problems_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="one of speed"):
        evaluated_system(label)


def test_attended_tokens() -> None:
    settings = {"sink_tokens": 4, "recent_tokens": 16}
    for name in (*DECODE_MODES, "cache-rank"):
        system = System.parse(f"{name}:sparse_budget=32")
        assert attended_tokens(system, settings) == 4 + 32 + 16 + 1


def test_flags() -> None:
    flags = system_flags(
        System.parse("cache-rank"), {"sparse_budget": 100}, threshold=90, requests=8
    )
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    assert values["--cache-rank-gpus"] == "1"
    assert values["--sparse-threshold"] == "121"  # the working set is no larger
    assert values["--max-sparse-requests"] == "8"
    assert system_flags(System.parse("dense"), {}, 90, 8) == ["--cache-rank-gpus", "0"]
    quest = system_flags(System.parse("quest"), {}, 90, 8)
    assert quest[:4] == ["--cache-rank-gpus", "0", "--decode-mode", "quest"]
    assert "--sparse-threshold" not in quest


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_problems(name: str) -> None:
    preset = PRESETS[name]
    for dials in preset.dials:
        assert TASKS[preset.task].make(0, **dials).hops > 0
    for label in preset.systems:
        assert evaluated_system(label).label == label


@pytest.mark.usefixtures("quiet")
def test_servers_accept_the_flags_of_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument that a preset gives, with every value that it gives it."""
    from scripts.baselines.args import BaselineServerArgs
    from sglang_ext import cpu, server_args

    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    seen: set[tuple[str, object]] = set()
    for preset in PRESETS.values():
        for system in map(System.parse, preset.systems):
            new = {("name", system.name), *system.changes.items()} - seen
            if new and system.name != "dense":
                is_baseline = system.mode in DECODE_MODES
                parsed = server_args.parse_server_args(
                    system_flags(system, POLICY, 264, 64),
                    BaselineServerArgs if is_baseline else server_args.CacheRankServerArgs,
                )
                assert parsed.sparse_budget == {**POLICY, **system.changes}["sparse_budget"]
                seen |= new
    assert ("kv_residency", "mosaickv") in seen
