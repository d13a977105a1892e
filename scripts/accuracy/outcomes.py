"""The records of an evaluation: a line a problem, and what is derived from the lines of a cell."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable
from typing import Any, TypeVar

import msgspec

from scripts.accuracy.statistics import Estimate
from scripts.shared.systems import System

KeyT = TypeVar("KeyT")


class Cell(msgspec.Struct, frozen=True):
    """What is held fixed while problems vary."""

    model: str  # see scripts.shared.models
    system: str  # label, see scripts.shared.systems
    task: str  # name in TASKS
    dials: dict[str, Any]  # all dials of the task but the seed

    @property
    def problems(self) -> tuple[str, str, str]:
        """Model, task and dials: cells are compared where these are equal."""
        return self.model, self.task, ", ".join(f"{k}={v}" for k, v in sorted(self.dials.items()))

    @property
    def key(self) -> tuple[tuple[str, str, str], str]:
        """The identity of the cell, for sets and maps."""
        return self.problems, self.system


class Outcome(msgspec.Struct, frozen=True):
    """A problem, decoded and graded."""

    cell: Cell
    seed: int
    correct_hops: int  # Grade explains this and the next three
    correct_prefix_hops: int
    hops: int
    exact: bool
    prompt_tokens: int  # the server's count
    output_tokens: int
    sparse_steps: int | None = None  # steps over a working set; None without a cache rank
    late_steps: int = 0  # steps that waited for their selection
    stale_steps: int = 0  # steps that missed their selection


class Run(msgspec.Struct):
    """How outcomes came about."""

    commands: list[str]  # commands that were run, the first and those which resumed it
    machine: dict[str, Any]  # what it ran on, and versions
    settings: dict[str, Any]  # arguments of sparse systems, see scripts.accuracy.settings
    dtype: str  # dtype of the KV pool
    servers: dict[str, dict[str, Any]] = {}  # what servers said, by label
    failures: dict[str, str] = {}  # failures of servers, by label


class Result(msgspec.Struct):
    """A cell in numbers; intervals are 95% over problems."""

    cell: Cell
    chains: int  # problems
    exact: Estimate  # fraction of problems whose every word is right
    exact_difference: Estimate | None  # difference to dense decoding of the same problems
    hop_accuracy: Estimate  # fraction of lookups that were right, a problem
    correct_prefix: Estimate  # hops before the first wrong word
    hops: int  # mean of a problem
    survival: list[float]  # fraction of chains that are right up to hop 1, 2, ..., `hops`
    output_tokens: Estimate  # mean of a problem
    sparse_steps: float | None  # fraction of decode steps; None without a cache rank
    late_steps: float  # fraction of the sparse ones
    stale_steps: float  # fraction of the sparse ones
    flops: float | None = None  # work of the inference rank a token; None if it is unknown
    cache_rank_flops: float | None = None  # work of the cache rank's scores a token
    bits: float | None = None  # bits of an element on the cache rank, metadata included

    @property
    def system(self) -> System:
        """The parsed label."""
        return System.parse(self.cell.system)


def grouped(
    results: Iterable[Result], key: Callable[[Result], KeyT]
) -> ItemsView[KeyT, list[Result]]:
    """Results of equal keys together, in the order in which the keys first occur."""
    groups: dict[KeyT, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups.items()
