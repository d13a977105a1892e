"""Plots of accuracy against what it costs; Matplotlib is imported only to draw."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.accuracy.statistics import Estimate
from scripts.accuracy.summary import Result
from scripts.accuracy.systems import DENSE, System
from scripts.shared.presentation import COLOURS

MARKERS = "osD^vPX*<>hd"
MOST_CURVES = len(COLOURS)


class Axis(NamedTuple):
    """What accuracy is drawn against.

    Attributes:
        name: of the file.
        label: of the axis.
        value: of a result; None leaves it out.
        hidden: arguments that labels of curves leave out.
    """

    name: str
    label: str
    value: Callable[[Result], Any]
    hidden: frozenset[str] = frozenset()


SELF_EXPLANATORY = ("query_", "kv_residency")
"""Arguments whose values are words that need no name before them."""

BUDGET_ONLY = frozenset({"sparse_budget"})
BUDGET = Axis(
    "budget",
    "k, selected tokens of a KV head",
    lambda result: result.system.changes.get("sparse_budget"),
    BUDGET_ONLY,
)
AXES = (
    BUDGET,
    Axis("flops", "FLOPs a token, inference rank", lambda result: result.flops, BUDGET_ONLY),
    Axis("bits", "bits of an element, cache rank", lambda result: result.bits),
)
RESTATEMENTS = Axis(
    "restatements",
    "r, statements of a key",
    lambda result: result.cell.dials.get("restatements"),
)


def write_plots(results: Sequence[Result], out: Path) -> list[Path]:
    """Draw what varies, as PNG and SVG; the files. Nothing without Matplotlib."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError:
        return []
    files: list[Path] = []
    for model, task in dict.fromkeys(result.cell.problems[:2] for result in results):
        there = [result for result in results if result.cell.problems[:2] == (model, task)]
        name = f"{task}-{Path(model).name}"
        sets = dict.fromkeys(result.cell.problems[2] for result in there)
        for index, problems in enumerate(sets):
            same = [result for result in there if result.cell.problems[2] == problems]
            suffix = name if len(sets) == 1 else f"{name}-{index + 1}"
            title = f"{task}: {problems}"
            for axis in AXES:
                files += _against(same, axis, title, out, suffix)
            files += _lengths(same, title, out, suffix)
        files += _against(there, RESTATEMENTS, task, out, name)
    return files


def curve_name(system: System, hidden: frozenset[str] = frozenset()) -> str:
    """A label for readers: `cache-rank: ridge, pre`, without the hidden arguments."""
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
    curves: dict[str, list[Result]] = {}
    for result in placed:
        curves.setdefault(curve_name(result.system, hidden), []).append(result)
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    for index, (name, points) in enumerate(curves.items()):
        points = sorted(points, key=axis.value)
        style = _style(index, name)
        for axes, estimates in (
            (panels[0], [point.exact for point in points]),
            (panels[1], [point.hop_accuracy for point in points]),
        ):
            axes.errorbar(
                [axis.value(point) for point in points],
                [estimate.value for estimate in estimates],
                yerr=_bars(estimates),
                **style,
            )
    if axis is BUDGET:
        for axes in panels:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
        dense = next((result for result in results if result.system.name == DENSE), None)
        if dense is not None:
            line = {"color": "black", "linestyle": "dashed", "linewidth": 1, "label": DENSE}
            panels[0].axhline(dense.exact.value, **line)
            panels[1].axhline(dense.hop_accuracy.value, **line)
    if axis is RESTATEMENTS:
        for axes in panels:
            axes.xaxis.get_major_locator().set_params(integer=True)
    for axes, title_of_panel in zip(panels, ("exact chains", "hop accuracy"), strict=True):
        _finish(axes, title_of_panel, axis.label)
    figure.suptitle(title, fontsize=10)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, fontsize=8, frameon=False, loc="outside right center")
    return _save(pyplot, figure, out / f"{axis.name}-{suffix}")


def _common(results: Sequence[Result]) -> frozenset[str]:
    """The budget, if all systems which have one have the same."""
    budgets = {BUDGET.value(result) for result in results} - {None}
    return BUDGET_ONLY if len(budgets) < 2 else frozenset()


def _lengths(results: Sequence[Result], title: str, out: Path, suffix: str) -> list[Path]:
    """Fraction of chains that are right up to a hop: accuracy against the length of a chain."""
    if results[0].hops < 2 or len(results) > 2 * MOST_CURVES:
        return []
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for index, result in enumerate(results):
        style = _style(index, curve_name(result.system, _common(results)))
        style.pop("marker")
        if index >= MOST_CURVES:
            style["linestyle"] = "dotted"
        axes.plot(range(result.hops + 1), [1.0, *result.survival], **style)
    _finish(axes, title, "length, hops")
    axes.set_ylabel("chains without a mistake so far")
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    return _save(pyplot, figure, out / f"length-{suffix}")


def _style(index: int, name: str) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.2,
        "label": name,
    }


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    return [
        [max(0.0, estimate.value - estimate.low) for estimate in estimates],
        [max(0.0, estimate.high - estimate.value) for estimate in estimates],
    ]


def _finish(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(label)
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _save(pyplot: Any, figure: Any, stem: Path) -> list[Path]:
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        # No date in the file: the same results give the same bytes.
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
    return files
