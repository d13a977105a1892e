"""Labels and the servers they name; every preset is one that the server's arguments accept."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from scripts.accuracy.presets import PRESETS
from scripts.accuracy.systems import DECODE_MODES, NAMES, POLICY, System, parse_label, to_flags
from scripts.accuracy.tasks import TASKS


@pytest.fixture
def quiet() -> Iterator[None]:
    """Parsing sets up logging and the environment: leave them as they were."""
    environment, handlers, level = dict(os.environ), logging.root.handlers, logging.root.level
    logging.root.handlers = []
    yield
    logging.root.handlers, logging.root.level = handlers, level
    os.environ.clear()
    os.environ.update(environment)


def test_a_label_reads_what_it_prints() -> None:
    for preset in PRESETS.values():
        for label in preset.systems:
            assert System.parse(label).label == label


def test_a_label_changes_arguments() -> None:
    assert parse_label("x:a=1,b=two,c=0.5") == ("x", {"a": 1, "b": "two", "c": 0.5})
    system = System.parse("cache-rank:query_predictor=ridge,sparse_budget=7")
    assert system.changes == {"query_predictor": "ridge", "sparse_budget": 7}
    policy = system.policy({"sparse_budget": 9, "sink_tokens": 3})
    assert (policy["sparse_budget"], policy["sink_tokens"]) == (7, 3)
    assert policy["delta_capacity"] == 7
    assert policy["recent_tokens"] == POLICY["recent_tokens"]


@pytest.mark.parametrize("label", ["full", "cache-rank:k", "dense:sparse_budget=1", ""])
def test_a_wrong_label_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"system|ARGUMENT|no arguments"):
        System.parse(label)


def test_a_budget_goes_to_those_who_have_one() -> None:
    assert System.parse("dense").with_budget(5) == System("dense")
    assert System.parse("quest").with_budget(5).label == "quest:sparse_budget=5"
    named = System.parse("quest:sparse_budget=6")
    assert named.with_budget(5) == named


def test_attended_tokens() -> None:
    settings = {"sink_tokens": 4, "recent_tokens": 16}
    for name in (*DECODE_MODES, "cache-rank"):
        assert System.parse(f"{name}:sparse_budget=32").attended(settings) == 4 + 32 + 16 + 1


def test_flags() -> None:
    flags = System.parse("cache-rank").flags({"sparse_budget": 100}, threshold=90, requests=8)
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    assert values["--cache-rank-gpus"] == "1"
    assert values["--sparse-threshold"] == "121"  # the working set is no larger
    assert values["--max-sparse-requests"] == "8"
    assert System.parse("dense").flags({}, 90, 8) == ["--cache-rank-gpus", "0"]
    quest = System.parse("quest").flags({}, 90, 8)
    assert quest[:4] == ["--cache-rank-gpus", "0", "--decode-mode", "quest"]
    assert "--sparse-threshold" not in quest


def test_flags_of_lists_and_switches() -> None:
    flags = to_flags({"enable_metrics": True, "kv_residency_options": "bits=2+partition=16"})
    assert flags == ["--enable-metrics", "--kv-residency-options", "bits=2,partition=16"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_problems(name: str) -> None:
    preset = PRESETS[name]
    for dials in preset.dials:
        assert TASKS[preset.task].make(0, **dials).hops > 0
    assert {System.parse(label).name for label in preset.systems} <= set(NAMES)


@pytest.mark.usefixtures("quiet")
def test_servers_accept_the_flags_of_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument that a preset gives, with every value that it gives it."""
    from sglang_ext import cpu, server_args

    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    seen: set[tuple[str, object]] = set()
    for preset in PRESETS.values():
        for system in map(System.parse, preset.systems):
            new = {("name", system.name), *system.changes.items()} - seen
            if new and system.name != "dense":
                parsed = server_args.parse_server_args(system.flags(POLICY, 264, 64))
                assert parsed.sparse_budget == {**POLICY, **system.changes}["sparse_budget"]
                seen |= new
    assert ("kv_residency", "mosaickv") in seen
