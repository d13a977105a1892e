"""Servers of a comparison: what is started for each label, and what is refused before."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest

from scripts.evaluate import parse_options
from scripts.shared import comparison
from scripts.shared.comparison import Load, Run, make_systems, serve_each, server_flags
from scripts.shared.systems import DECODE_MODES, System

LOAD = Load(4, 4 * 579, 259)


def options_of(*arguments: str) -> Namespace:
    return parse_options(["--out", "out", *arguments])


def value_of(flags: Sequence[str], flag: str) -> str:
    """The value that counts: that of the last one."""
    return flags[len(flags) - flags[::-1].index(flag)]


def test_each_system_has_each_budget_but_for_dense_decoding_and_those_that_name_theirs() -> None:
    arguments = "--gpus --budgets 1 2 --systems dense quest cache-rank:sparse_budget=9"
    assert [system.label for system in make_systems(options_of(*arguments.split()))] == [
        "dense",
        "quest:sparse_budget=1",
        "quest:sparse_budget=2",
        "cache-rank:sparse_budget=9",
    ]


def test_a_server_has_room_for_its_requests() -> None:
    options = options_of("--gpus", "0", "1")
    flags = server_flags(System.parse("cache-rank:sparse_budget=16"), options, LOAD)
    assert flags[flags.index("--cuda-graph-bs-decode") + 1 :][:3] == ["1", "2", "4"]
    assert value_of(flags, "--max-running-requests") == "5"  # one counts twice in chunks
    assert value_of(flags, "--max-sparse-requests") == "4"
    assert value_of(flags, "--cache-rank-gpus") == "1"


def test_a_request_turns_sparse_at_its_threshold_whatever_the_budget() -> None:
    flags = server_flags(System.parse("cache-rank:sparse_budget=9999"), options_of("--gpus"), LOAD)
    assert value_of(flags, "--sparse-threshold") == "259"
    assert value_of(flags, "--max-swap-tokens") == "9999"


@pytest.mark.usefixtures("quiet")
def test_a_server_accepts_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.baselines.plugin import BaselineServerArgs
    from sglang_ext import cpu
    from sglang_ext.server_args import CacheRankServerArgs, parse_server_args

    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    monkeypatch.setenv("CACHE_RANK_ALLOW_LARGE_BUDGET", "1")
    options = options_of("--gpus", "--systems", *DECODE_MODES, "cache-rank", "--budgets", "32")
    for system in make_systems(options):
        kind = CacheRankServerArgs if system.has_cache_rank else BaselineServerArgs
        parsed = parse_server_args(server_flags(system, options, LOAD), kind)
        assert (parsed.sparse_budget, parsed.recent_tokens) == (32, 16)


class Server:
    """Starts at once, on these GPUs."""

    def __init__(self, flags: Sequence[str], environment: dict[str, str]) -> None:
        self.gpus = environment["CUDA_VISIBLE_DEVICES"]

    def wait_ready(self) -> Server:
        return self

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("gpus", "served", "failure"),
    [
        ("0 1 2", {"dense": "0", "cache-rank:sparse_budget=9": "0,1"}, {}),
        ("0", {"dense": "0"}, {"cache-rank:sparse_budget=9": "needs 2 GPUs, and there are 1"}),
    ],
)
def test_a_system_that_fails_is_noted_and_the_others_go_on(
    gpus: str, served: dict[str, str], failure: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[str, str] = {}

    def use(server: Any, system: System) -> None:
        if system.name == "quest":
            raise ValueError("no memory")
        used[system.label] = server.gpus

    monkeypatch.setattr(comparison, "Server", Server)
    systems = "quest:sparse_budget=1 dense cache-rank:sparse_budget=9"
    options = options_of("--gpus", *gpus.split(), "--systems", *systems.split())
    run = Run(commands=[], machine={}, model="bundled", settings={})
    serve_each(make_systems(options), options, LOAD, run, use)
    assert used == served
    expected = {"quest:sparse_budget=1": "no memory", **failure}
    assert run.failures == {label: f"ValueError: {why}" for label, why in expected.items()}
