"""Writes what `evaluate` found: JSON, Markdown tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from scripts.accuracy.plots import write_plots
from scripts.accuracy.statistics import Estimate
from scripts.accuracy.summary import Result, Run
from scripts.accuracy.tasks import TASKS
from scripts.shared import report
from scripts.shared.report import number, percent, table

HEADER = (
    *("system", "changed", "k", "exact chain", "minus dense", "hop accuracy", "correct prefix"),
    *("output tokens", "sparse steps", "stale", "recall", "mass", "MFLOPs a token", "bits"),
)


class Report(msgspec.Struct):
    """The content of `results.json`."""

    run: Run
    results: list[Result]


def write_report(run: Run, results: list[Result], out: Path) -> list[Path]:
    """Write all files into a folder; their paths. No plots if Matplotlib is not installed."""
    files = report.write_report(out, "results", Report(run, results), markdown(run, results))
    return [*files, *write_plots(results, out)]


def markdown(run: Run, results: Sequence[Result]) -> str:
    """A table for each set of problems."""
    machine = [f"{name} {value}" for name, value in run.machine.items() if value]
    settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
    parts = [
        "# Accuracy",
        "\n".join(f"    {command}" for command in run.commands),
        f"{', '.join(machine)}. Sparse systems: {settings}. KV pool: {run.dtype}.",
        "Brackets are 95% intervals over problems (bootstrap, paired for differences). Of n "
        "right ones out of n, they say nothing: an error rate of 3/n is not excluded.",
    ]
    for model, task in dict.fromkeys(result.cell.problems[:2] for result in results):
        there = [result for result in results if result.cell.problems[:2] == (model, task)]
        name = varying_dial(there)
        if name:
            text = f"Exact chains and, in parentheses, hop accuracy, by {name}. Model "
            parts += [f"## {task} by {name}", f"{text}{Path(model).name}.", by_dial(there, name)]
    for problems in dict.fromkeys(result.cell.problems for result in results):
        model, task, dials = problems
        there = [result for result in results if result.cell.problems == problems]
        chains = sorted({result.chains for result in there})
        parts += [
            f"## {task}: {dials}",
            f"Model {Path(model).name}; {'–'.join(map(str, chains))} problems of "
            f"{there[0].hops} hops. Exposes: {TASKS[task].exposes}.",
            table(HEADER, map(_cells, there)),
        ]
    parts += [f"{label} failed: {reason}" for label, reason in run.failures.items()]
    return "\n\n".join(parts)


def varying_dial(results: Sequence[Result]) -> str | None:
    """The one dial in which problems differ, if there is one."""
    values: dict[str, set[str]] = {}
    for result in results:
        for name, value in result.cell.dials.items():
            values.setdefault(name, set()).add(str(value))
    varying = [name for name, found in values.items() if len(found) > 1]
    return varying[0] if len(varying) == 1 else None


def by_dial(results: Sequence[Result], name: str) -> str:
    """The accuracy of each system at each value of a dial."""
    columns = sorted({result.cell.dials[name] for result in results if name in result.cell.dials})
    found = {(r.cell.system, r.cell.dials.get(name)): r for r in results}
    rows = []
    for label in dict.fromkeys(result.cell.system for result in results):
        cells = [found.get((label, column)) for column in columns]
        shown = [
            "–" if r is None else f"{r.exact.value:.2f} ({r.hop_accuracy.value:.3f})" for r in cells
        ]
        rows.append([label, *shown])
    return table(("system", *(f"{name} {column}" for column in columns)), rows)


def _cells(result: Result) -> list[str]:
    changes = dict(result.system.changes)
    budget = changes.pop("sparse_budget", None)
    return [
        result.system.name,
        ", ".join(f"{name} {value}" for name, value in changes.items()),
        number(budget, 0),
        interval(result.exact),
        interval(result.exact_difference),
        interval(result.hop_accuracy, 3),
        interval(result.correct_prefix, 1),
        number(result.output_tokens.value, 0),
        percent(result.sparse_steps),
        "–" if result.sparse_steps is None else percent(result.stale_steps),
        number(result.recall, 3),
        number(result.attention_mass, 3),
        number(None if result.flops is None else result.flops / 1e6, 3),
        number(result.bits, 2),
    ]


def interval(estimate: Estimate | None, digits: int = 2) -> str:
    """A mean and its interval, which is left out where it is a point."""
    if estimate is None:
        return "–"
    value, low, high = (f"{part:.{digits}f}" for part in estimate)
    return value if low == high == value else f"{value} [{low}, {high}]"
