"""A comparison as JSON, Markdown and a plot."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec

from scripts.accuracy.benchmarks.comparison import Comparison, Report, Summary
from scripts.accuracy.statistics import Estimate
from scripts.shared.presentation import COLOURS, number, table


def write_report(report: Report, out: Path) -> list[Path]:
    """Write comparison.json, comparison.md and comparison.png; the files."""
    out.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    (out / "comparison.json").write_text(encoded + "\n", encoding="utf-8")
    (out / "comparison.md").write_text(markdown(report) + "\n", encoding="utf-8")
    _plot(report, out / "comparison.png")
    return [out / f"comparison.{suffix}" for suffix in ("json", "md", "png")]


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
        parts += [
            "The cache ranks during the runs:",
            table(["benchmark", "", baseline, system], counters),
        ]
    return "\n\n".join(parts)


def _accuracy_table(report: Report) -> str:
    baseline, system = report.names
    header = ["benchmark", "questions × answers", baseline, system, "difference, points"]
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
        row
        for comparison in report.comparisons
        for row in (
            _length_row(comparison, report.names[0], comparison.baseline, None),
            _length_row(comparison, report.names[1], comparison.system, comparison.tokens_ratio),
        )
    ]
    return table([*header, "cut", "none", "failed", "seconds"], rows)


def _length_row(
    comparison: Comparison, name: str, summary: Summary, ratio: Estimate | None
) -> list[str]:
    return [
        comparison.benchmark,
        name,
        f"{summary.tokens.value:.0f}",
        _interval(ratio, digits=3) if ratio else "",
        number(summary.tokens_per_right_answer, 0),
        f"{100 * summary.truncated:.1f}%",
        f"{100 * summary.unanswered:.1f}%",
        f"{100 * summary.failed:.1f}%",
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


def _plot(report: Report, path: Path) -> None:
    """Differences and their intervals, one line a benchmark: accuracy, then length."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    baseline, system = report.names
    figure, axes = pyplot.subplots(
        1, 2, sharey=True, figsize=(9, 1.6 + 0.4 * len(report.comparisons)), layout="constrained"
    )
    comparisons = report.comparisons
    series = (
        (axes[0], "accuracy, points", 0, 100, [c.accuracy_difference for c in comparisons]),
        (axes[1], "tokens of an answer, ratio", 1, 1, [c.tokens_ratio for c in comparisons]),
    )
    for panel, label, equal, scale, estimates in series:
        for line, estimate in enumerate(estimates):
            value, low, high = (scale * end for end in estimate)
            panel.plot([low, high], [line, line], color=COLOURS[0], linewidth=2)
            panel.plot([value], [line], "o", color=COLOURS[0])
        panel.axvline(equal, color=COLOURS[7], linewidth=1)
        panel.set_xlabel(label)
        panel.spines[["top", "right", "left"]].set_visible(False)
    axes[0].set_yticks(range(len(comparisons)), [c.benchmark for c in comparisons])
    axes[0].invert_yaxis()
    figure.suptitle(f"{system} against {baseline}, 95% intervals over questions", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
