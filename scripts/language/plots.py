"""Plots of what `score_text` found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.accuracy import statistics
from scripts.accuracy.plots import curve_name
from scripts.language.records import Cell, TextRun
from scripts.shared import plots
from scripts.shared.systems import System

SMOOTHING = 16
"""A curve by position is the mean of so many tokens before and after."""


def write_plots(run: TextRun, cells: Sequence[Cell], out: Path) -> list[Path]:
    """Draw KL by budget and by position; nothing without Matplotlib."""
    if not plots.can_draw() or not cells:
        return []
    title = f"{Path(run.model).name}, {len(run.texts)} texts of {run.context} tokens"
    return [
        *_by_budget(cells, title, out),
        *_by_position(cells, title, out),
    ]


def _by_budget(cells: Sequence[Cell], title: str, out: Path) -> list[Path]:
    figure, (kl, ratio) = plots.panels(2, (9, 3.8))
    for index, system in enumerate(dict.fromkeys(cell.system for cell in cells)):
        found = [cell for cell in cells if cell.system == system and cell.budget is not None]
        budgets = [cell.budget for cell in found]
        for axes, field in ((kl, "kl"), (ratio, "ratio_p5")):
            values = [[getattr(score, field) for score in cell.scores] for cell in found]
            _line(axes, budgets, values, _name(system), index)
    for axes in (kl, ratio):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    kl.set_yscale("log")
    ratio.set_ylim(0, 1)
    plots.label(kl, title, "k, selected tokens of a KV head", "KL(dense ‖ system), nats a token")
    plots.label(ratio, "5th percentile of p(system) / p(dense)", "k, selected tokens of a KV head")
    plots.legend(figure, (kl, ratio))
    return plots.save(figure, out / "kl-budget")


def _line(
    axes: Any, x: Sequence[int | None], values: list[list[float]], name: str, index: int
) -> None:
    """Means over texts, with intervals where there are several texts."""
    style = {"color": plots.colour(index), "marker": plots.marker(index), "markersize": 4}
    if min(map(len, values), default=0) < 2:
        axes.plot(x, [np.mean(v) for v in values], label=name, **style)
        return
    found = [statistics.mean(np.array(v)) for v in values]
    mean = np.array([estimate.value for estimate in found])
    ends = np.array([(estimate.low, estimate.high) for estimate in found]).T
    axes.errorbar(x, mean, np.abs(ends - mean), label=name, capsize=2, linewidth=1.2, **style)


def _by_position(cells: Sequence[Cell], title: str, out: Path) -> list[Path]:
    counts = Counter(cell.budget for cell in cells if cell.budget is not None)
    # A budget of one system alone has nothing beside it to be compared with.
    budgets = sorted(budget for budget, count in counts.items() if count == max(counts.values()))
    if not budgets:
        return []
    cells = [cell for cell in cells if cell.budget in budgets]
    figure, axes = plots.panels(len(budgets), (1 + 3.2 * len(budgets), 3.6), sharey=True)
    systems = list(dict.fromkeys(cell.system for cell in cells))
    for cell in cells:
        assert cell.budget is not None
        shortest = min(len(score.kl_after_transition) for score in cell.scores)
        kl = np.mean([score.kl_after_transition[:shortest] for score in cell.scores], axis=0)
        window = np.ones(2 * SMOOTHING + 1)
        smooth = np.convolve(kl, window, "same") / np.convolve(np.ones_like(kl), window, "same")
        colour = plots.colour(systems.index(cell.system))
        axes[budgets.index(cell.budget)].plot(smooth, label=_name(cell.system), color=colour)
    for one, budget in zip(axes, budgets, strict=True):
        one.set_yscale("log")
        plots.label(one, f"k = {budget}", "tokens since attention became sparse")
    axes[0].set_ylabel("KL(dense ‖ system), nats a token")
    figure.suptitle(title, fontsize=10)
    plots.legend(figure, axes)
    return plots.save(figure, out / "kl-position")


def _name(label: str) -> str:
    return curve_name(System.parse(label))
