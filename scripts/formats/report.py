"""Writes what `compare_formats` measured: JSON, Markdown tables and a plot."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from scripts.formats.quality import Measurement, Throughput
from scripts.shared import plots, report
from scripts.shared.report import number, table


class Comparison(msgspec.Struct):
    """All formats on one sample."""

    command: list[str]  # command that was run, in words
    machine: dict[str, Any]  # see scripts.shared.machine.describe
    source: str  # description of the sample
    tokens: int  # description of the sample
    steps: int  # the newest tokens of the sample, whose queries there are
    budget: int  # k
    rows: int  # requests of a step that was timed
    measurements: list[Measurement]  # one a line


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write all files into a folder; their paths. No plot if Matplotlib is not installed."""
    files = report.write_report(out, "formats", comparison, markdown(comparison))
    return [*files, *write_plot(comparison, out / "formats")]


def markdown(comparison: Comparison) -> str:
    """Both tables."""
    machine = comparison.machine
    where = [*machine.get("gpus", []), machine.get("platform", ""), f"{machine.get('cpus')} cores"]
    parts = [
        "# Residency formats",
        f"`{shlex.join(comparison.command)}`",
        ", ".join(filter(None, where)),
        f"Data: {comparison.source}. Selection: k = {comparison.budget}, by the true queries of "
        f"the newest {comparison.steps} tokens.",
        "## Error and selection",
        quality_table(comparison.measurements),
        "## Throughput",
        f"Loading a sequence; scoring, and gathering for, {comparison.rows} of them at once. A "
        "token is one in all layers and KV heads.",
        throughput_table(comparison.measurements),
    ]
    return "\n\n".join(parts)


def quality_table(measurements: list[Measurement]) -> str:
    """Errors are vNMSE."""
    header = [
        *("format", "options", "bits held", "key bits scored", "K", "V", "attention output"),
        *("scores", "recall", "attention mass"),
    ]
    rows = []
    for m in measurements:
        errors = (m.key_error, m.value_error, m.output_error, m.score_error)
        rows.append(
            [
                *(m.format, m.options, number(m.bits, 3), number(m.key_bits, 0)),
                *("–" if error is None else f"{error:.1e}" for error in errors),
                *(number(part, 3) for part in (m.recall, m.attention_mass)),
            ]
        )
    return table(header, rows)


def throughput_table(measurements: list[Measurement]) -> str:
    """Thousands of tokens and 10^9 bytes a second of each operation."""
    header = ["format", "options"]
    for operation in ("encode", "score", "gather"):
        header += [f"{operation}, 1000 tokens/s", "GB/s"]
    rows = [
        [m.format, m.options, *_cells(m.encode), *_cells(m.score), *_cells(m.gather)]
        for m in measurements
        if m.score
    ]
    return table(header, rows)


def _cells(throughput: Throughput | None) -> list[str]:
    if throughput is None:
        return ["–", "–"]
    return [number(throughput.tokens / 1e3, 0), number(throughput.gigabytes)]


def write_plot(comparison: Comparison, stem: Path) -> list[Path]:
    """Draw error against bits: of the attention output as held, and of scores as read."""
    if not plots.can_draw():
        return []
    figure, panels = plots.panels(2, (12, 5), sharey=True)
    views = (
        ("attention output", "bits of an element, as held", "bits", "output_error"),
        ("scores", "bits of a key's element that scores read", "key_bits", "score_error"),
    )
    names = list(dict.fromkeys(m.format for m in comparison.measurements))
    for axes, (title, label, bits, error) in zip(panels, views, strict=True):
        for index, m in enumerate(comparison.measurements):
            x, y = getattr(m, bits), getattr(m, error)
            if x and y:  # an error of 0 has no place on a logarithmic scale
                style = {"marker": plots.marker(index), "linestyle": "none"}
                style["color"] = plots.colour(names.index(m.format))
                axes.plot(x, y, label=f"{m.format} {m.options}".strip(), **style)
        plots.label(axes, title, label)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("vNMSE")
    # The second panel has the formats whose attention output is exact, too.
    plots.legend(figure, panels)
    figure.suptitle(comparison.source, fontsize=10)
    return plots.save(figure, stem, ("png",))
