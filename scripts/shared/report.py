"""Writes reports: numbers and intervals as text, Markdown tables, and the files of a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec


def table_of(rows: Iterable[Mapping[str, str]]) -> str:
    """A Markdown table of rows whose cells name their columns; cells that are missing are empty.

    All but the first two columns are numbers.
    """
    rows = list(rows)
    if not rows:
        return "Nothing so far."
    header = list(dict.fromkeys(name for row in rows for name in row))
    rule = ["---" if column < 2 else "---:" for column in range(len(header))]
    cells = [header, rule, *([row.get(name, "") for name in header] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def provenance(commands: Sequence[str], machine: Mapping[str, Any]) -> str:
    """The head of a report: what was typed, and on what machine, as `machine.describe` says it."""
    gpus = machine.get("gpus") or []
    kinds = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    rest = [f"{name} {value}" for name, value in machine.items() if value and name != "gpus"]
    typed = "\n".join(f"    {command}" for command in commands)
    return f"{typed}\n\n{', '.join((*kinds, *rest))}."


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals, or a dash for none."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage, or a dash for none."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def write_report(out: Path, name: str, data: Any, text: str) -> list[Path]:
    """Write NAME.json and NAME.md into a folder, and return their paths.

    A file is replaced whole, so that a machine that stops at any time leaves no half of one.
    """
    out.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(data), indent=2).decode()
    files = {out / f"{name}.json": encoded, out / f"{name}.md": text}
    for path, content in files.items():
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_text(content + "\n", encoding="utf-8")
        unfinished.replace(path)
    return list(files)
