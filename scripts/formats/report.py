"""Writes what `compare_formats` measured: JSON, Markdown tables and a plot."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any

import msgspec

from scripts.formats.quality import Measurement, Throughput
from scripts.shared.presentation import COLOURS, number, table

MARKERS = "os^DvPX*<>"


class Comparison(msgspec.Struct):
    """All formats on one sample.

    Attributes:
        command: that was run, in words.
        machine: see `scripts.speed.machine.describe`.
        source: of the sample.
        tokens, steps: of the sample, and of them those with queries.
        budget: k.
        rows: requests of a step that was timed.
        measurements: one a line.
    """

    command: list[str]
    machine: dict[str, Any]
    source: str
    tokens: int
    steps: int
    budget: int
    rows: int
    measurements: list[Measurement]


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write all files into a folder; their paths. No plot if matplotlib is not installed."""
    out.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(comparison), indent=2)
    files = {"formats.json": encoded.decode(), "formats.md": markdown(comparison)}
    for name, text in files.items():
        (out / name).write_text(text + "\n")
    return [*(out / name for name in files), *write_plot(comparison, out / "formats.png")]


def read_comparison(path: Path) -> Comparison:
    """Read a `formats.json`."""
    return msgspec.json.decode(path.read_bytes(), type=Comparison)


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


def write_plot(comparison: Comparison, path: Path) -> list[Path]:
    """Draw error against bits: of the attention output as held, and of scores as read."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError:
        return []
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    views = (
        ("attention output", "bits of an element, as held", "bits", "output_error"),
        ("scores", "bits of a key's element that scores read", "key_bits", "score_error"),
    )
    names = list(dict.fromkeys(m.format for m in comparison.measurements))
    for axes, (title, label, bits, error) in zip(panels, views, strict=True):
        for index, m in enumerate(comparison.measurements):
            x, y = getattr(m, bits), getattr(m, error)
            if not x or not y:  # an error of 0 has no place on a logarithmic scale
                continue
            axes.plot(
                x,
                y,
                marker=MARKERS[index % len(MARKERS)],
                linestyle="none",
                color=COLOURS[names.index(m.format) % len(COLOURS)],
                label=f"{m.format} {m.options}".strip(),
            )
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("vNMSE")
    # The second panel has the formats whose attention output is exact, too.
    handles = {text: handle for axes in panels for handle, text in zip(*_legend(axes), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), fontsize=8, frameon=False, loc="outside right center"
    )
    figure.suptitle(comparison.source, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return [path]


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    handles, texts = axes.get_legend_handles_labels()
    return handles, texts
