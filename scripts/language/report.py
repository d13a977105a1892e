"""What `score_text` found: tables with intervals over texts, and a plot."""

from __future__ import annotations

import itertools
import statistics as averages
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.language.records import Cell, Report, TextRun, cells_of
from scripts.shared import plots, report, statistics
from scripts.shared.comparison import describe_failures, describe_run
from scripts.shared.report import number, table

MEASURES = {
    "KL": ("kl", 4),
    "NLL minus dense": ("nll_difference", 4),
    "top-1 agreement": ("top1_agreement", 3),
    "ratio, mean": ("ratio_mean", 3),
    "ratio, 5 %": ("ratio_p5", 2),
}
"""The columns of the first table: a field of Score, and decimals."""

POSITIONS = (0, 16, 64, 128, 256, 1024, 4096)
"""Divergence by tokens since the transition is averaged from one of these to the next."""

EXPLANATION = """\
KL is of the dense distribution from the system's, over the whole vocabulary, in nats a token. NLL
is of the text's own tokens. The ratio is the system's probability over dense decoding's of tokens
that dense decoding draws: its mean, where a ratio above 1 counts as 1, and its 5th percentile
(Sparrow, arXiv 2606.08446, asks for .86). Brackets are 95 % intervals over texts."""


def markdown(found: Report) -> str:
    """The report as text."""
    run, cells = found.run, cells_of(found.cells)
    parts = [
        f"# {Path(run.model).name} on {len(run.texts)} texts",
        describe_run(run),
        f"Of each text {run.context} tokens, the last {run.scored} of which count, after "
        f"{run.warm_up} that decode while systems become sparse.",
        EXPLANATION,
        _summary(cells),
        "## KL by text",
        _by_text(cells, run),
        "## KL by tokens since the transition",
        _by_position(cells),
        "## Texts",
        table(
            ("text", "kind", "sha256"),
            ([name, text.kind, text.sha256[:16]] for name, text in run.texts.items()),
        ),
        *describe_failures(run),
    ]
    return "\n\n".join(parts)


def _summary(cells: Sequence[Cell]) -> str:
    header = ("system", "k", "attended", *MEASURES)
    rows = [
        [
            *_names(cell),
            str(cell.scores[0].attended),
            *(
                interval([getattr(s, field) for s in cell.scores], n)
                for field, n in MEASURES.values()
            ),
        ]
        for cell in cells
    ]
    return table(header, rows)


def _by_text(cells: Sequence[Cell], run: TextRun) -> str:
    rows = []
    for cell in cells:
        kl = {score.text: score.kl for score in cell.scores}
        rows.append([*_names(cell), *(number(kl.get(text), 4) for text in run.texts)])
    return table(("system", "k", *run.texts), rows)


def _by_position(cells: Sequence[Cell]) -> str:
    longest = max((len(s.kl_after_transition) for cell in cells for s in cell.scores), default=0)
    ranges = [
        (start, min(stop, longest))
        for start, stop in itertools.pairwise(POSITIONS)
        if start < longest
    ]
    rows = []
    for cell in cells:
        by_token = [score.kl_after_transition for score in cell.scores]
        means = [[v for kl in by_token for v in kl[start:stop]] for start, stop in ranges]
        rows.append([*_names(cell), *(number(averages.mean(m) if m else None, 4) for m in means)])
    return table(("system", "k", *(f"{start + 1} to {stop}" for start, stop in ranges)), rows)


def _names(cell: Cell) -> list[str]:
    return [cell.system, "–" if cell.budget is None else str(cell.budget)]


def interval(values: Sequence[float | None], digits: int) -> str:
    """The mean and its interval, if there are several values; a dash for none."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return number(known[0] if known else None, digits)
    return statistics.interval(statistics.mean(known), digits)


def write_report(found: Report, out: Path) -> list[Path]:
    """Write results.json, results.md and a plot; the files."""
    files = report.write_report(out, "results", found, markdown(found))
    return [*files, *_plot(found.run, cells_of(found.cells), out)]


def _plot(run: TextRun, cells: Sequence[Cell], out: Path) -> list[Path]:
    """Draw KL and the low ratio by budget, if there is Matplotlib and a budget that was given."""
    cells = [cell for cell in cells if cell.budget is not None]
    if not plots.can_draw() or not cells:
        return []
    figure, (kl, ratio) = plots.panels(2, (9, 3.8))
    for index, system in enumerate(dict.fromkeys(cell.system for cell in cells)):
        found = [cell for cell in cells if cell.system == system]
        for axes, field in ((kl, "kl"), (ratio, "ratio_p5")):
            values = [[getattr(score, field) for score in cell.scores] for cell in found]
            _line(axes, [cell.budget for cell in found], values, system, index)
    for axes in (kl, ratio):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    kl.set_yscale("log")
    ratio.set_ylim(0, 1)
    title = f"{Path(run.model).name}, {len(run.texts)} texts of {run.context} tokens"
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
        axes.plot(x, [averages.fmean(v) for v in values], label=name, **style)
        return
    found = [statistics.mean(v) for v in values]
    mean = np.array([estimate.value for estimate in found])
    ends = np.array([(estimate.low, estimate.high) for estimate in found]).T
    axes.errorbar(x, mean, np.abs(ends - mean), label=name, capsize=2, linewidth=1.2, **style)
