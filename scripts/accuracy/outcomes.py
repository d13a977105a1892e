"""One line a problem: what a system made of it. The lines are the result; all else is derived."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec


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
    def key(self) -> tuple[str, ...]:
        """The identity of the cell, for sets and maps."""
        return (*self.problems, self.system)


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
    recall: float | None = None  # mean over its measured steps, see docs/recall.md
    attention_mass: float | None = None  # mean over its measured steps


class OutcomeFile:
    """Outcomes as JSON lines, appended to as they come; threads may share it."""

    def __init__(self, path: Path) -> None:
        """Open for appending; the folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()

    def append(self, outcome: Outcome) -> None:
        """Write a line."""
        line = msgspec.json.encode(outcome) + b"\n"
        with self._lock, self._path.open("ab") as file:
            file.write(line)

    def read(self) -> list[Outcome]:
        """All outcomes so far; the last line may be half a line, if a run was killed."""
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().splitlines(keepends=True)
        return [msgspec.json.decode(line, type=Outcome) for line in lines if line.endswith(b"\n")]

    def drop_half_line(self) -> None:
        """Cut what a killed run left unfinished, so that the next line starts on its own."""
        if self._path.exists():
            whole = self._path.read_bytes()
            self._path.write_bytes(whole[: whole.rfind(b"\n") + 1])


def seeds_done(outcomes: Iterable[Outcome]) -> dict[tuple[str, ...], set[int]]:
    """The seeds of each cell, by its key."""
    done: dict[tuple[str, ...], set[int]] = {}
    for outcome in outcomes:
        done.setdefault(outcome.cell.key, set()).add(outcome.seed)
    return done
