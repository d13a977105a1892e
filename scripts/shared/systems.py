"""The ways to serve a model that are compared, for accuracy and for speed alike.

A label names a system and the server arguments that it changes: `cache-rank:query_predictor=spade`,
where arguments are named as in CacheRankServerArgs. A list inside a value is joined with `+`:
`kv_residency_options=bits=2+partition=16`. An argument that is `null` is left to its default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from scripts.shared.command import UsageError
from sglang_ext.flags import CONFIG_FLAG, CONFIG_KEYS

CACHE_RANK = "cache-rank"
INLINE = "inline"
DENSE = "dense"
DECODE_MODES = ("window", "quest", "tova", "oracle")
"""Synchronous baselines of the same engine: they select with the current query."""


class System(msgspec.Struct, frozen=True):
    """A way to serve a model."""

    name: str  # names it in SYSTEMS
    mode: str  # of a decode step: DENSE, one of DECODE_MODES, INLINE, or CACHE_RANK
    arguments: dict[str, Any] = {}  # server arguments that make it what it is
    gpus: int = 1  # that it needs, where there are any
    at_budget: bool = False  # it runs at a context of the sparse budget, whatever the shape's
    changes: dict[str, Any] = {}  # server arguments that its label changes

    @classmethod
    def parse(cls, label: str) -> System:
        """Read a label; UsageError if there is no such system, or its budget makes no sense."""
        name, _, changes = label.partition(":")
        if name not in SYSTEMS:
            raise UsageError(f"no system {name!r}: choose from {', '.join(SYSTEMS)}")
        system = msgspec.structs.replace(SYSTEMS[name], changes=parse_assignments(changes))
        if "sparse_budget" in system.changes and not system.has_budget:
            raise UsageError(f"{label!r}: {name} has no arguments of sparse attention")
        if system.mode in DECODE_MODES and system.changes.get("sparse_budget", 0) is None:
            raise UsageError(f"{label!r}: {name} has no budget of its own")
        return system

    @property
    def label(self) -> str:
        """What `parse` reads."""
        changes = ",".join(
            f"{key}={'null' if value is None else value}" for key, value in self.changes.items()
        )
        return f"{self.name}:{changes}" if changes else self.name

    @property
    def is_sparse(self) -> bool:
        """Whether a server of it takes the arguments of sparse attention."""
        return self.mode != DENSE

    @property
    def has_cache_rank(self) -> bool:
        """Whether a server of it has one: requests decode densely until it holds their prompts."""
        return self.mode == CACHE_RANK

    @property
    def has_budget(self) -> bool:
        """Whether a sparse budget means anything to it."""
        return self.is_sparse or self.at_budget

    def with_budget(self, budget: int) -> System:
        """The same with a budget, if it takes one and its label names none."""
        if not self.has_budget or "sparse_budget" in self.changes:
            return self
        changes = {"sparse_budget": budget, **self.changes}
        return msgspec.structs.replace(self, changes=changes)

    def without_budget(self) -> tuple[str, int | None]:
        """Its label without the budget, and the budget."""
        changes = {name: v for name, v in self.changes.items() if name != "sparse_budget"}
        budget = self.changes.get("sparse_budget") if self.is_sparse else None
        return msgspec.structs.replace(self, changes=changes).label, budget


NO_CACHE_RANK, ONE_CACHE_RANK = {"cache_rank_gpus": 0}, {"cache_rank_gpus": 1}
WORKING_SET = ONE_CACHE_RANK | {"inference_kv": "working-set"}
FP8, TP2 = {"kv_cache_dtype": "fp8_e4m3"}, {"tp_size": 2}

SYSTEMS = {
    system.name: system
    for system in (
        System("floor", DENSE, NO_CACHE_RANK, at_budget=True),
        System(DENSE, DENSE, NO_CACHE_RANK),
        System("fp8", DENSE, NO_CACHE_RANK | FP8),
        System("tp2", DENSE, NO_CACHE_RANK | TP2, gpus=2),
        System("tp2-fp8", DENSE, NO_CACHE_RANK | TP2 | FP8, gpus=2),
        *(System(mode, mode, NO_CACHE_RANK | {"decode_mode": mode}) for mode in DECODE_MODES),
        System(INLINE, INLINE),
        System("inline-fp8", INLINE, FP8),
        System("inline-tp2", INLINE, TP2, gpus=2),
        System("inline-tp2-fp8", INLINE, TP2 | FP8, gpus=2),
        System(CACHE_RANK, CACHE_RANK, ONE_CACHE_RANK | {"inference_kv": "full"}, gpus=2),
        System("cache-rank-working-set", CACHE_RANK, WORKING_SET, gpus=2),
    )
}


def parse_assignments(text: str) -> dict[str, Any]:
    """Read `facts=128,hops=80`; a value is JSON, or else a text. UsageError without `=`."""
    found: dict[str, Any] = {}
    for assignment in filter(None, text.split(",")):
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"{assignment!r}: write ARGUMENT=VALUE,ARGUMENT=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def to_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of a server as its command line."""
    flags: list[str] = []
    settings = {name: _listed(arguments[name]) for name in CONFIG_KEYS if name in arguments}
    if settings:
        flags += [CONFIG_FLAG, json.dumps(settings)]
    for name, value in arguments.items():
        if name in settings or value is None or value is False:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            flags += map(str, value)
        elif isinstance(value, dict):
            flags.append(json.dumps(value))
        elif value is not True:
            flags.append(str(_listed(value)))
    return flags


def _listed(value: Any) -> Any:
    """A value as servers read it, where `,` separates and not `+`."""
    return value.replace("+", ",") if isinstance(value, str) else value
