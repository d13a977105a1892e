"""Plots of what `decode_text` found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.accuracy.plots import curve_name
from scripts.language.answers import Agreement, Answer, AnswerReport
from scripts.language.cells import by_system, with_budget
from scripts.shared import plots


def write_plots(found: AnswerReport, out: Path) -> list[Path]:
    """Draw accuracy by length, and what became of the answers; nothing without Matplotlib."""
    if not plots.can_draw():
        return []
    title = f"{Path(found.run.model).name}, {found.run.problems} requests a point"
    return [*_accuracy(found.answers, title, out), *_answers(found.questions, title, out)]


def _accuracy(answers: Sequence[Answer], title: str, out: Path) -> list[Path]:
    """The share of right words by the length of the prompt, a panel a task."""
    tasks = list(dict.fromkeys(a.task for a in answers if a.exact is not None))
    if not tasks:
        return []
    figure, panels = plots.panels(len(tasks), (2 + 3.6 * len(tasks), 3.8), sharey=True)
    for axes, task in zip(panels, tasks, strict=True):
        groups = by_system(a for a in answers if a.task == task)
        for index, (key, there) in enumerate(groups.items()):
            lengths = sorted({answer.length for answer in there})
            shares = [
                np.mean([a.right / a.words for a in there if a.length == length])
                for length in lengths
            ]
            axes.plot(lengths, shares, **_style(index, _name(*key)))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(-0.03, 1.03)
        plots.label(axes, task, "tokens of the prompt")
    panels[0].set_ylabel("right words, share")
    figure.suptitle(title, fontsize=10)
    plots.legend(figure, panels)
    return plots.save(figure, out / "accuracy-length")


def _answers(found: Sequence[Agreement], title: str, out: Path) -> list[Path]:
    """Answers that still are dense decoding's, by tokens; and lengths beside dense decoding's."""
    if not found:
        return []
    figure, (same, lengths) = plots.panels(2, (10, 3.8))
    longest = max(max(agreement.lengths) for agreement in found)
    tokens = np.arange(longest)
    for index, agreement in enumerate(found):
        style = _style(index, _name(agreement.system, agreement.budget))
        ends = np.array([np.inf if place is None else place for place in agreement.same])
        shares = (ends[:, None] > tokens).mean(axis=0)
        same.plot(tokens, shares, color=style["color"], label=style["label"])
        lengths.plot(agreement.dense_lengths, agreement.lengths, linestyle="none", **style)
    lengths.plot([0, longest], [0, longest], color="black", linewidth=0.8, linestyle="dashed")
    same.set_ylim(-0.03, 1.03)
    plots.label(same, "answers without a difference so far", "tokens behind the opening", "share")
    plots.label(lengths, "tokens of an answer", "dense", "system")
    figure.suptitle(title, fontsize=10)
    plots.legend(figure, (same,))
    return plots.save(figure, out / "answers")


def _style(index: int, name: str) -> dict[str, Any]:
    marker, colour = plots.marker(index), plots.colour(index)
    return {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2, "label": name}


def _name(label: str, budget: int | None) -> str:
    return curve_name(with_budget(label, budget))
