"""Draws: the only place that imports Matplotlib, which is optional."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"),
    *("#000000", "#5B3A8C", "#8C6D31"),
)
MARKERS = "osD^vPX*<>hd"


def can_draw() -> bool:
    """Whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def panels(columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, list[Any]]:
    """A figure of a size in inches, and its axes, side by side; `Figure.subplots` has options."""
    importlib.import_module("matplotlib").use("Agg")
    figure = importlib.import_module("matplotlib.figure").Figure(size, layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


def colour(index: int) -> str:
    """The colour of a series; they come round again after the last."""
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    """The marker of a series."""
    return MARKERS[index % len(MARKERS)]


def label(axes: Any, title: str = "", x: str = "", y: str = "") -> None:
    """Name the axes, and take away the frame that shows nothing."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Any, axes: Sequence[Any], place: str = "right center") -> None:
    """One legend outside the axes, of the series of all of them."""
    series: dict[str, Any] = {}
    for one in axes:
        for handle, text in zip(*one.get_legend_handles_labels(), strict=True):
            series.setdefault(text, handle)
    where = f"outside {place}"
    figure.legend(series.values(), series.keys(), fontsize=8, frameon=False, loc=where)


def save(figure: Any, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write STEM.png and STEM.svg; the same figure gives the same bytes."""
    matplotlib = importlib.import_module("matplotlib")
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context({"svg.hashsalt": stem.name}):
        for file in files:
            metadata = {"Date": None} if file.suffix == ".svg" else None
            figure.savefig(file, dpi=150, metadata=metadata)
    return files
