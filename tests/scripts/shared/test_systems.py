"""Labels, and the systems that they name."""

from __future__ import annotations

import pytest

from scripts.shared.systems import SYSTEMS, System, parse_assignments, to_flags

HACK = "kv_residency=hack,kv_residency_options=bits=2+partition=64"


@pytest.mark.parametrize("label", [*SYSTEMS, f"cache-rank:{HACK}"])
def test_a_label_reads_what_it_prints(label: str) -> None:
    assert System.parse(label).label == label


def test_a_label_changes_arguments() -> None:
    assert parse_assignments("a=1,b=two,c=0.5") == {"a": 1, "b": "two", "c": 0.5}
    system = System.parse("cache-rank:query_predictor=spade,sparse_budget=7")
    assert system.changes == {"query_predictor": "spade", "sparse_budget": 7}
    assert (system.gpus, system.arguments["cache_rank_gpus"]) == (2, 1)


@pytest.mark.parametrize(
    "label",
    ["full", "cache-rank:k", "dense:sparse_budget=1", "quest:sparse_budget=null", ":a=1", ""],
)
def test_a_wrong_label_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"system|ARGUMENT|no arguments|no budget"):
        System.parse(label)


def test_a_budget_goes_to_those_who_have_one() -> None:
    assert System.parse("dense").with_budget(5) == System.parse("dense")
    assert System.parse("quest").with_budget(5).label == "quest:sparse_budget=5"
    named = System.parse("quest:sparse_budget=6")
    assert named.with_budget(5) == named


def test_a_label_may_leave_its_budget_to_the_server() -> None:
    system = System.parse("inline:sparse_budget=null").with_budget(5)
    assert system.label == "inline:sparse_budget=null"
    assert to_flags(system.changes) == []
    assert system.without_budget() == ("inline", None)


def test_flags_of_lists_and_switches() -> None:
    flags = to_flags({"enable_metrics": True, "kv_residency_options": "bits=2+partition=16"})
    assert flags == [
        *("--cache-rank-config", '{"kv_residency_options": "bits=2,partition=16"}'),
        "--enable-metrics",
    ]
    given = {"cuda_graph_bs_decode": [1, 2], "cuda_graph_config": {"bs": [1]}, "trust": False}
    flags = to_flags(given)
    assert flags == ["--cuda-graph-bs-decode", "1", "2", "--cuda-graph-config", '{"bs": [1]}']
