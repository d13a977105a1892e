"""Servers of a comparison: what is started for each label, and what is refused before."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence

import pytest

from scripts.evaluate import SETTINGS, main, parse_options
from scripts.shared.comparison import Load, attended_tokens, make_systems, server_flags
from scripts.shared.systems import DECODE_MODES, System

LOAD = Load(4, 4 * 579, 259)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Parsing sets up logging and the environment: leave them as they were."""
    environment, handlers, level = dict(os.environ), logging.root.handlers, logging.root.level
    logging.root.handlers = []
    yield
    logging.root.handlers, logging.root.level = handlers, level
    os.environ.clear()
    os.environ.update(environment)


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


def test_a_label_goes_before_the_settings_of_a_run_and_those_before_the_default() -> None:
    options = options_of("--gpus", "--set", "sink_tokens=3,recent_tokens=7")
    system = System.parse("cache-rank:recent_tokens=5,sparse_budget=40")
    flags = server_flags(system, options, LOAD)
    assert (value_of(flags, "--sink-tokens"), value_of(flags, "--recent-tokens")) == ("3", "5")
    assert value_of(flags, "--hysteresis") == str(SETTINGS["hysteresis"])
    assert attended_tokens(system, options.settings) == 3 + 40 + 5 + 1


def test_baselines_take_what_they_share_with_a_cache_rank() -> None:
    for mode in DECODE_MODES:
        system = System.parse(f"{mode}:sparse_budget=32")
        flags = server_flags(system, options_of("--gpus"), LOAD)
        assert value_of(flags, "--decode-mode") == mode
        assert value_of(flags, "--sparse-budget") == "32"
        assert "--sparse-threshold" not in flags
    assert "--sparse-budget" not in server_flags(System.parse("dense"), options_of("--gpus"), LOAD)


@pytest.mark.usefixtures("quiet")
def test_a_server_accepts_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.baselines.args import BaselineServerArgs
    from sglang_ext import cpu
    from sglang_ext.server_args import CacheRankServerArgs, parse_server_args

    monkeypatch.setattr(cpu, "has_gpu", lambda: False)
    monkeypatch.setenv("CACHE_RANK_ALLOW_LARGE_BUDGET", "1")
    options = options_of("--gpus", "--systems", *DECODE_MODES, "cache-rank", "--budgets", "32")
    for system in make_systems(options):
        kind = CacheRankServerArgs if system.has_cache_rank else BaselineServerArgs
        parsed = parse_server_args(server_flags(system, options, LOAD), kind)
        assert (parsed.sparse_budget, parsed.recent_tokens) == (32, 16)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--chains 1", "--chains must be at least 2"),
        ("--base-url http://x --systems quest --budgets 1 2", "--base-url serves one system"),
        ("--budgets 0", "--budgets must be at least 1"),
        ("--model /nowhere", "no model '/nowhere'"),
        ("--systems no", "no system 'no'"),
        ("--systems floor", "one of speed"),
        ("--set facts", "--set: 'facts': write ARGUMENT=VALUE"),
        ("--server-flags '", "--server-flags: No closing quotation"),
    ],
)
def test_wrong_options_are_refused(
    arguments: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        options_of("--gpus", *arguments.split())
    assert why in capsys.readouterr().err


def test_impossible_chains_are_refused() -> None:
    with pytest.raises(SystemExit, match="facts must be in"):
        main(["--out", "out", "--gpus", "--facts", "1"])
