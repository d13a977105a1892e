"""Writes what `compare_formats` measured: JSON, Markdown tables and a plot."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripts.formats.quality import Measurement
from scripts.shared import plots, report
from scripts.shared.report import number, table, table_of


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


def quality_table(measurements: Sequence[Measurement]) -> str:
    """Errors are vNMSE."""

    def error(value: float | None) -> str:
        return "–" if value is None else f"{value:.1e}"

    return table_of(
        {
            "format": m.format,
            "options": m.options,
            "bits held": number(m.bits, 3),
            "key bits scored": number(m.key_bits, 0),
            "K": error(m.key_error),
            "V": error(m.value_error),
            "attention output": error(m.output_error),
            "scores": error(m.score_error),
            "recall": number(m.recall, 3),
            "attention mass": number(m.attention_mass, 3),
        }
        for m in measurements
    )


def throughput_table(measurements: Sequence[Measurement]) -> str:
    """Thousands of tokens and 10^9 bytes a second of each operation."""
    operations = ("encode", "score", "gather")
    header = ["format", "options"]
    header += [unit for name in operations for unit in (f"{name}, 1000 tokens/s", "GB/s")]
    rows = []
    for m in measurements:
        speeds = [speed for speed in (m.encode, m.score, m.gather) if speed]
        cells = [(number(s.tokens / 1e3, 0), number(s.gigabytes)) for s in speeds]
        rows.append([m.format, m.options, *itertools.chain(*cells)])
    return table(header, [row for row in rows if len(row) == len(header)])


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
                colour, marker = plots.colour(names.index(m.format)), plots.marker(index)
                name = f"{m.format} {m.options}".strip()
                axes.plot(x, y, label=name, color=colour, marker=marker, linestyle="none")
        plots.label(axes, title, label)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("vNMSE")
    # The second panel has the formats whose attention output is exact, too.
    plots.legend(figure, panels)
    figure.suptitle(comparison.source, fontsize=10)
    return plots.save(figure, stem, ("png",))
