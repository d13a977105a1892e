"""One line a problem: what a system made of it. The lines are the result; all else is derived."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec


class Cell(msgspec.Struct, frozen=True):
    """What is held fixed while problems vary.

    Attributes:
        model: see `scripts.accuracy.checkpoints`.
        system: label, see `scripts.accuracy.systems`.
        task: of TASKS.
        dials: of the task, but for the seed.
    """

    model: str
    system: str
    task: str
    dials: dict[str, Any]

    @property
    def problems(self) -> tuple[str, str, str]:
        """Equal for cells whose problems are the same: those that are compared."""
        return self.model, self.task, ", ".join(f"{k}={v}" for k, v in sorted(self.dials.items()))

    @property
    def key(self) -> tuple[str, ...]:
        """Identity, for sets and maps."""
        return (*self.problems, self.system)


class Outcome(msgspec.Struct, frozen=True):
    """A problem, decoded and graded.

    Attributes:
        cell: that it belongs to.
        seed: of the problem.
        correct_hops, correct_prefix_hops, hops, exact: see Grade.
        prompt_tokens, output_tokens: as the server counts them.
        sparse_steps: decode steps over a working set; None for a server without a cache rank.
        late_steps, stale_steps: see the README; steps that waited, and that missed their selection.
        recall, attention_mass: means over its measured steps, see docs/recall.md; None without any.
    """

    cell: Cell
    seed: int
    correct_hops: int
    correct_prefix_hops: int
    hops: int
    exact: bool
    prompt_tokens: int
    output_tokens: int
    sparse_steps: int | None = None
    late_steps: int = 0
    stale_steps: int = 0
    recall: float | None = None
    attention_mass: float | None = None


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
        found = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                found.append(msgspec.json.decode(line, type=Outcome))
        return found

    def drop_half_line(self) -> None:
        """Cut what a killed run left unfinished, so that the next line starts on its own."""
        if self._path.exists():
            whole = self._path.read_bytes()
            self._path.write_bytes(whole[: whole.rfind(b"\n") + 1])


def seeds_done(outcomes: Iterable[Outcome]) -> dict[tuple[str, ...], set[int]]:
    """Seeds of each cell, by its key."""
    done: dict[tuple[str, ...], set[int]] = {}
    for outcome in outcomes:
        done.setdefault(outcome.cell.key, set()).add(outcome.seed)
    return done
