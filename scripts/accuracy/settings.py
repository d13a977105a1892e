"""The server arguments with which a system is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.shared.systems import CACHE_RANK, DENSE, System, to_flags

POLICY: dict[str, Any] = {
    "sparse_budget": 64,
    "sink_tokens": 4,
    "recent_tokens": 16,
    "dense_layers": 1,
    "hysteresis": 8,
    "query_window": 16,
    "recall_interval": 4,
    "kv_residency": "bf16",
}
"""These are the arguments of sparse systems where neither a label nor the user says otherwise: a
small model attends to few tokens and repeats queries, and its first layer keeps count of where it
is. Answers are short, so that recall has to be measured often. Keys are as they came, so that what
is lost is by the selection; what a format loses is asked for by its name."""

_SHARED = ("sparse_budget", "sink_tokens", "recent_tokens", "dense_layers")
"""The baselines take these of POLICY."""


def evaluated_system(label: str) -> System:
    """Read the label of a system whose accuracy can be measured.

    Raises:
        ValueError: there is no such system, or it does not serve whole sequences.
    """
    system = System.parse(label)
    if system.at_budget or not system.is_server or system.servers > 1:
        raise ValueError(f"the system {system.name!r} is one of speed: it answers no problems")
    return system


def policy_of(system: System, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of selection: POLICY, then the run's settings, then the label's."""
    if system.mode == DENSE:
        return {}
    merged = {**POLICY, **settings, **system.changes}
    if system.mode != CACHE_RANK:
        return {key: merged[key] for key in _SHARED}
    # A selection may change whole from one step to the next, as it does in the baselines.
    return {"max_swap_tokens": merged["sparse_budget"], **merged}


def attended_tokens(system: System, settings: Mapping[str, Any]) -> int:
    """The most tokens that a sparse layer attends to: sinks, selected and recent ones, its own."""
    policy = policy_of(system, settings)
    return sum(policy.get(key, 0) for key in _SHARED[:3]) + 1


def system_flags(
    system: System, settings: Mapping[str, Any], threshold: int, requests: int
) -> list[str]:
    """The command line of a server of a system.

    Args:
        system: what is served.
        settings: arguments of the run, see POLICY.
        threshold: tokens of a request before anything is looked up.
        requests: requests that run at once.
    """
    arguments = dict(system.arguments)
    if system.mode == CACHE_RANK:
        arguments["sparse_threshold"] = max(threshold, attended_tokens(system, settings))
        arguments["max_sparse_requests"] = requests
    return to_flags(arguments | policy_of(system, settings) | system.changes)
