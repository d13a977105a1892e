"""Plots of accuracy against what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.accuracy.outcomes import Result, grouped
from scripts.shared import plots
from scripts.shared.systems import DENSE, System

MOST_CURVES = len(plots.COLOURS)


SELF_EXPLANATORY = ("query_", "kv_residency")
"""The values of these arguments are words that need no name before them."""

BUDGET_ONLY = frozenset({"sparse_budget"})


class Axis(NamedTuple):
    """What accuracy is drawn against."""

    name: str  # name of the file
    label: str
    value: Callable[[Result], Any]  # value of a result; None leaves it out
    hidden: frozenset[str] = frozenset()  # arguments that labels of curves leave out


BUDGET = Axis(
    "budget",
    "k, selected tokens of a KV head",
    lambda result: result.system.changes.get("sparse_budget"),
    BUDGET_ONLY,
)
FLOPS = Axis("flops", "FLOPs a token, inference rank", lambda result: result.flops, BUDGET_ONLY)
BITS = Axis("bits", "bits of an element, cache rank", lambda result: result.bits)
RESTATEMENTS = Axis(
    "restatements", "r, statements of a key", lambda result: result.cell.dials.get("restatements")
)


def write_plots(results: Sequence[Result], out: Path) -> list[Path]:
    """Draw what varies, as PNG and SVG; the files. Nothing without Matplotlib."""
    if not plots.can_draw():
        return []
    files: list[Path] = []
    for (model, task), there in grouped(results, lambda r: r.cell.problems[:2]):
        name = f"{task}-{Path(model).name}"
        sets = grouped(there, lambda r: r.cell.problems[2])
        for index, (problems, same) in enumerate(sets):
            suffix = name if len(sets) == 1 else f"{name}-{index + 1}"
            title = f"{task}: {problems}"
            for axis in (BUDGET, FLOPS, BITS):
                files += _against(same, axis, title, out, suffix)
            files += _lengths(same, title, out, suffix)
        files += _against(there, RESTATEMENTS, task, out, name)
    return files


def curve_name(system: System, hidden: frozenset[str] = frozenset()) -> str:
    """A label for readers: `cache-rank: spade`, without the hidden arguments."""
    changes = [
        str(value) if name.startswith(SELF_EXPLANATORY) and isinstance(value, str)
        else f"{name} {value}"
        for name, value in system.changes.items()
        if name not in hidden
    ]  # fmt: skip
    return f"{system.name}: {', '.join(changes)}" if changes else system.name


def _against(
    results: Sequence[Result], axis: Axis, title: str, out: Path, suffix: str
) -> list[Path]:
    """Exact chains and hop accuracy against a quantity; nothing if it does not vary."""
    placed = [result for result in results if axis.value(result) is not None]
    if len({axis.value(result) for result in placed}) < 2:
        return []
    hidden = axis.hidden | _common(placed)
    curves = grouped(placed, lambda r: curve_name(r.system, hidden))
    figure, panels = plots.panels(2, (12, 4.5), sharey=True)
    dense = next((result for result in results if result.system.name == DENSE), None)
    for axes, name, accuracy in (
        (panels[0], "exact chains", "exact"),
        (panels[1], "hop accuracy", "hop_accuracy"),
    ):
        for index, (curve, points) in enumerate(curves):
            points = sorted(points, key=axis.value)
            value, low, high = np.array([getattr(point, accuracy) for point in points]).T
            axes.errorbar(
                [axis.value(point) for point in points],
                value,
                yerr=np.maximum(0.0, [value - low, high - value]),
                marker=plots.marker(index),
                **_style(index, curve),
            )
        if axis is BUDGET:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            if dense is not None:
                height = getattr(dense, accuracy).value
                axes.axhline(height, color="black", linestyle="dashed", linewidth=1, label=DENSE)
        if axis is RESTATEMENTS:
            axes.xaxis.get_major_locator().set_params(integer=True)
        _finish(axes, name, axis.label)
    figure.suptitle(title, fontsize=10)
    plots.legend(figure, panels[:1])
    return plots.save(figure, out / f"{axis.name}-{suffix}")


def _common(results: Sequence[Result]) -> frozenset[str]:
    """The budget, if all systems which have one have the same."""
    budgets = {BUDGET.value(result) for result in results} - {None}
    return BUDGET_ONLY if len(budgets) < 2 else frozenset()


def _lengths(results: Sequence[Result], title: str, out: Path, suffix: str) -> list[Path]:
    """The fraction of chains that are right up to a hop, against the length of a chain."""
    if results[0].hops < 2 or len(results) > 2 * MOST_CURVES:
        return []
    figure, (axes,) = plots.panels(1, (8, 4.5))
    for index, result in enumerate(results):
        style = _style(index, curve_name(result.system, _common(results)))
        line = "solid" if index < MOST_CURVES else "dotted"
        axes.plot(range(result.hops + 1), [1.0, *result.survival], linestyle=line, **style)
    _finish(axes, title, "length, hops", "chains without a mistake so far")
    plots.legend(figure, [axes])
    return plots.save(figure, out / f"length-{suffix}")


def _style(index: int, name: str) -> dict[str, Any]:
    return {"color": plots.colour(index), "markersize": 5, "linewidth": 1.2, "label": name}


def _finish(axes: Any, title: str, x: str, y: str = "") -> None:
    plots.label(axes, title, x, y)
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
