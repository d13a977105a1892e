"""What is compared: ways to decode, named by labels, and the server flags of each.

A label is a name and the arguments that it changes: `cache-rank:query_predictor=ridge`, where
arguments are named as in CacheRankServerArgs. A list inside a value is joined with `+`:
`kv_residency_options=bits=2+partition=16`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

CACHE_RANK = "cache-rank"
DENSE = "dense"
DECODE_MODES = ("window", "quest", "tova", "oracle")
"""Synchronous baselines of the same engine: they select with the current query."""

NAMES = (DENSE, *DECODE_MODES, CACHE_RANK)

POLICY: dict[str, Any] = {
    "sparse_budget": 64,
    "sink_tokens": 4,
    "recent_tokens": 16,
    "dense_layers": 1,
    "selection_margin": 8,
    "query_predictor": "last",
    "query_frame": "pre",
    "query_window": 16,
    "recall_interval": 4,
}
"""Arguments of the sparse systems where neither a label nor the user says otherwise: a small model
attends to few tokens and repeats queries, and its first layer keeps count of where it is. Answers
are short, so that recall has to be measured often."""

_SHARED = ("sparse_budget", "sink_tokens", "recent_tokens", "dense_layers")
"""What the baselines take of POLICY."""


def parse_label(label: str) -> tuple[str, dict[str, Any]]:
    """The name and the changed arguments of a label.

    Raises:
        ValueError: an argument is not NAME=VALUE.
    """
    name, _, changes = label.partition(":")
    changed: dict[str, Any] = {}
    for change in filter(None, changes.split(",")):
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{label!r}: write NAME:ARGUMENT=VALUE,ARGUMENT=VALUE")
        try:
            changed[key] = json.loads(value)
        except json.JSONDecodeError:
            changed[key] = value
    return name, changed


class System(msgspec.Struct, frozen=True):
    """A way to decode.

    Attributes:
        name: of NAMES.
        changes: arguments that differ from the run's.
    """

    name: str
    changes: dict[str, Any] = {}

    @classmethod
    def parse(cls, label: str) -> System:
        """Read a label.

        Raises:
            ValueError: there is no such system, or an argument is not NAME=VALUE.
        """
        name, changes = parse_label(label)
        if name not in NAMES:
            raise ValueError(f"no system {name!r}: choose from {', '.join(NAMES)}")
        if name == DENSE and changes:
            raise ValueError(f"{label!r}: dense decoding has no arguments")
        return cls(name, changes)

    @property
    def label(self) -> str:
        """What `parse` reads."""
        changes = ",".join(f"{key}={value}" for key, value in self.changes.items())
        return f"{self.name}:{changes}" if changes else self.name

    @property
    def gpus(self) -> int:
        """That a server needs, where there are any."""
        return 2 if self.name == CACHE_RANK else 1

    def with_budget(self, budget: int) -> System:
        """The same with a budget, if it has one and names none of its own."""
        if self.name == DENSE or "sparse_budget" in self.changes:
            return self
        return System(self.name, {"sparse_budget": budget, **self.changes})

    def policy(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the selection: POLICY, then the run's settings, then the label's."""
        if self.name == DENSE:
            return {}
        merged = {**POLICY, **settings, **self.changes}
        if self.name != CACHE_RANK:
            return {key: merged[key] for key in _SHARED}
        # A selection may change whole from one step to the next, as it does in the baselines.
        return {"delta_capacity": merged["sparse_budget"], **merged}

    def attended(self, settings: Mapping[str, Any]) -> int:
        """Most tokens that a sparse layer attends to: sinks, selected and recent ones, its own."""
        policy = self.policy(settings)
        return sum(policy.get(key, 0) for key in _SHARED[:3]) + 1

    def flags(self, settings: Mapping[str, Any], threshold: int, requests: int) -> list[str]:
        """Command line of the server.

        Args:
            settings: arguments of the run, see POLICY.
            threshold: tokens of a request before anything is looked up.
            requests: that run at once.
        """
        arguments: dict[str, Any] = {"cache_rank_gpus": int(self.name == CACHE_RANK)}
        if self.name in DECODE_MODES:
            arguments["decode_mode"] = self.name
        if self.name == CACHE_RANK:
            arguments["sparse_threshold"] = max(threshold, self.attended(settings))
            arguments["max_sparse_requests"] = requests
        return to_flags(arguments | self.policy(settings))


def to_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as a command line."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        else:
            flags += [flag, str(value).replace("+", ",")]
    return flags
