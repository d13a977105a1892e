"""A system and its budget: what records of a comparison are grouped by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from scripts.shared.systems import DENSE, SYSTEMS, System


class OfSystem(Protocol):
    """A record of a system.

    Attributes:
        system: label, without the budget.
        budget: k, tokens that each KV head selects; None for a system that selects none.
    """

    @property
    def system(self) -> str: ...
    @property
    def budget(self) -> int | None: ...


RecordT = TypeVar("RecordT", bound=OfSystem)


def without_budget(system: System) -> tuple[str, int | None]:
    """The label of a system without its budget, and the budget."""
    changes = {name: v for name, v in system.changes.items() if name != "sparse_budget"}
    budget = system.changes.get("sparse_budget") if system.mode != DENSE else None
    return msgspec.structs.replace(system, changes=changes).label, budget


def with_budget(label: str, budget: int | None) -> System:
    """The system of a label without a budget, and of a budget."""
    system = System.parse(label)
    return system if budget is None else system.with_budget(budget)


def by_system(records: Iterable[RecordT]) -> dict[tuple[str, int | None], list[RecordT]]:
    """Records by system and budget, in the order of SYSTEMS, of labels as they come, of budgets."""
    groups: dict[tuple[str, int | None], list[RecordT]] = {}
    for record in records:
        groups.setdefault((record.system, record.budget), []).append(record)
    places, labels = list(SYSTEMS), list(dict.fromkeys(system for system, _ in groups))

    def place(key: tuple[str, int | None]) -> tuple[int, int, int]:
        system, budget = key
        return places.index(system.partition(":")[0]), labels.index(system), budget or 0

    return {key: groups[key] for key in sorted(groups, key=place)}
