"""A comparison as JSON, Markdown and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.accuracy.benchmarks.comparison import Comparison, Report, Summary
from scripts.accuracy.statistics import Estimate
from scripts.shared import plots, report
from scripts.shared.report import number, table


def write_report(comparison: Report, out: Path) -> list[Path]:
    """Write comparison.json, comparison.md and comparison.png; the files."""
    files = report.write_report(out, "comparison", comparison, markdown(comparison))
    return [*files, *_plot(comparison, out / "comparison")]


def markdown(report: Report) -> str:
    """All tables."""
    baseline, system = report.names
    parts = [
        f"# {system} against {baseline}",
        "Accuracy is the share of right answers, the mean over questions. Differences are of the "
        "same questions; [low, high] is a 95% interval from resampling questions. One that holds 0 "
        "does not show that the two are equal: it shows which differences are excluded.",
        _accuracy_table(report),
        _length_table(report),
        "Tokens are of an answer, its thinking included. *Cut* reached the most tokens; in *none* "
        "there was nothing to grade; *failed* requests are left out of all else. Seconds of an "
        "answer depend on how many requests ran at a time.",
    ]
    if report.warnings:
        parts += ["## Warnings", "\n".join(f"- {warning}" for warning in report.warnings)]
    parts += ["## What was run", _settings_table(report)]
    if report.server_differences:
        rows = [
            [name, *(f"`{_plain(value)}`" for value in values)]
            for name, values in report.server_differences.items()
        ]
        parts += ["What differs:", table(["", baseline, system], rows)]
    counters = [
        [benchmark, name, *(f"{side.get(name, 0):.1f}".removesuffix(".0") for side in sides)]
        for benchmark, sides in report.counters.items()
        for name in sorted(sides[0].keys() | sides[1].keys())
    ]
    if counters:
        header = ["benchmark", "", baseline, system]
        parts += ["The cache ranks during the runs:", table(header, counters)]
    return "\n\n".join(parts)


def _accuracy_table(report: Report) -> str:
    header = ["benchmark", "questions × answers", *report.names, "difference, points"]
    rows = [
        [
            c.benchmark,
            f"{c.questions} × {c.repeats}" if c.benchmark in report.settings else f"{c.questions}",
            _interval(c.baseline.accuracy, 100, "%"),
            _interval(c.system.accuracy, 100, "%"),
            _interval(c.accuracy_difference, 100, sign=True),
            f"{c.gained} / {c.lost}",
        ]
        for c in report.comparisons
    ]
    return table([*header, "questions better / worse"], rows)


def _length_table(report: Report) -> str:
    header = ["benchmark", "", "tokens", "ratio", "tokens a right answer"]
    rows = [
        _length_row(comparison, name, summary, ratio)
        for comparison in report.comparisons
        for name, summary, ratio in (
            (report.names[0], comparison.baseline, None),
            (report.names[1], comparison.system, comparison.tokens_ratio),
        )
    ]
    return table([*header, "cut", "none", "failed", "seconds"], rows)


def _length_row(
    comparison: Comparison, name: str, summary: Summary, ratio: Estimate | None
) -> list[str]:
    shares = (summary.truncated, summary.unanswered, summary.failed)
    return [
        *(comparison.benchmark, name, f"{summary.tokens.value:.0f}"),
        _interval(ratio, digits=3) if ratio else "",
        number(summary.tokens_per_right_answer, 0),
        *(f"{100 * share:.1f}%" for share in shares),
        number(summary.seconds, 1),
    ]


def _settings_table(report: Report) -> str:
    names = next(iter(report.settings.values()))
    rows = [
        [name, *(f"`{_plain(settings[name])}`" for settings in report.settings.values())]
        for name in names
        if any(settings[name] not in (None, "") for settings in report.settings.values())
    ]
    return table(["", *report.settings], rows)


def _interval(
    estimate: Estimate, scale: float = 1, unit: str = "", digits: int = 1, sign: bool = False
) -> str:
    plus = "+" if sign else ""
    value, low, high = (f"{scale * end:{plus}.{digits}f}" for end in estimate)
    return f"{value}{unit} [{low}, {high}]"


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "/").replace("\n", " ").strip() or "–"


def _plot(report: Report, stem: Path) -> list[Path]:
    """Differences and their intervals, one line a benchmark: accuracy, then length."""
    if not plots.can_draw():
        return []
    baseline, system = report.names
    comparisons = report.comparisons
    figure, panels = plots.panels(2, (9, 1.6 + 0.4 * len(comparisons)), sharey=True)
    series = (
        ("accuracy, points", 0, 100, [c.accuracy_difference for c in comparisons]),
        ("tokens of an answer, ratio", 1, 1, [c.tokens_ratio for c in comparisons]),
    )
    for axes, (label, equal, scale, estimates) in zip(panels, series, strict=True):
        for line, estimate in enumerate(estimates):
            value, low, high = (scale * end for end in estimate)
            axes.plot([low, high], [line, line], color=plots.COLOURS[0], linewidth=2)
            axes.plot([value], [line], "o", color=plots.COLOURS[0])
        axes.axvline(equal, color=plots.COLOURS[7], linewidth=1)
        plots.label(axes, x=label)
        axes.spines["left"].set_visible(False)
    panels[0].set_yticks(range(len(comparisons)), [c.benchmark for c in comparisons])
    panels[0].invert_yaxis()
    figure.suptitle(f"{system} against {baseline}, 95% intervals over questions", fontsize=10)
    return plots.save(figure, stem, ("png",))
