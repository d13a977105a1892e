"""Writes a trade-off: its points as JSON and as a table, and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scripts.accuracy import statistics
from scripts.language.records import Report
from scripts.language.report import interval
from scripts.shared import plots
from scripts.shared.report import number, table, write_report
from scripts.speed.jobs import Shape
from scripts.speed.records import Results
from scripts.tradeoff.points import Point


class Conditions(msgspec.Struct):
    """What the two sides of a trade-off were measured on.

    Attributes:
        texts: in a sentence, where divergence is from.
        steps: the same of steps, a sentence for each record.
        estimates: the same of estimates; empty where there are none.
        title: of the plot.
    """

    texts: str
    steps: list[str]
    estimates: str
    title: str


class Tradeoff(msgspec.Struct):
    """The content of `tradeoff.json`."""

    conditions: Conditions
    points: list[Point]


def describe(
    texts: Report, records: Sequence[Results], model: str, shape: Shape, estimated_gpu: str
) -> Conditions:
    """Say what was measured on what; `estimated_gpu` is empty where nothing is estimated."""
    run = texts.run
    text_model, step_model = Path(run.model).name, Path(model).name
    settings = ", ".join(f"{name}={value}" for name, value in run.settings.items())
    return Conditions(
        f"KL(dense ‖ system): {text_model}, {len(run.texts)} texts of {run.context} tokens, the "
        f"last {run.scored} of which count; {settings}; {_machine(run.machine)}; "
        f"`{'; '.join(run.commands)}`",
        [
            f"Steps: {step_model}, {shape.title}; {_machine(results.machine)}; "
            f"`{'; '.join(results.commands)}`"
            for results in records
        ],
        f"Estimated steps: {step_model}, {shape.title}, {estimated_gpu}, by sglang_ext/planning.py"
        if estimated_gpu
        else "",
        f"KL of {text_model}, {run.context} tokens; steps of {step_model}, {shape.title}",
    )


def _machine(machine: dict[str, Any]) -> str:
    gpus = machine.get("gpus") or []
    kinds = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    versions = [f"{name} {machine[name]}" for name in ("sglang", "torch") if name in machine]
    return ", ".join([*kinds, *versions])


def markdown(found: Tradeoff) -> str:
    """The table, and under it what was measured on what."""
    rows = [
        [
            point.curve,
            "estimated" if point.is_estimated else "measured",
            str(point.gpus),
            point.share or "all",
            *("–" if k is None else str(k) for k in (point.text_budget, point.step_budget)),
            interval(point.kl, 4),
            number(point.step_ms),
            number(point.tokens_per_second, 0),
            number(point.tokens_per_second_and_gpu, 0),
        ]
        for point in found.points
    ]
    header = ("system", "step", "GPUs", "share", "k of the texts", "k of the steps", "KL",
              "TPOT ms", "tokens/s", "tokens/s a GPU")  # fmt: skip
    conditions = found.conditions
    sentences = [conditions.texts, *conditions.steps, conditions.estimates]
    lines = [f"- {sentence}" for sentence in filter(None, sentences)]
    return "\n".join([table(header, rows), "", *lines])


def draw(found: Tradeoff) -> Any:
    """A curve a system: KL by the time of a step, and by tokens a second and GPU."""
    figure, panels = plots.panels(2, (10, 4.4), sharey=True)
    names = list(dict.fromkeys(point.curve for point in found.points))
    series: dict[tuple[str, bool], list[Point]] = {}
    for point in found.points:
        series.setdefault((point.curve, point.is_estimated), []).append(point)
    for (name, is_estimated), points in series.items():
        index = names.index(name)
        style = {"color": plots.colour(index), "linestyle": "--" if is_estimated else "-"}
        label = _label(points[0])
        for axes, field in zip(panels, ("step_ms", "tokens_per_second_and_gpu"), strict=True):
            placed = [point for point in points if getattr(point, field) is not None]
            x = [getattr(point, field) for point in placed]
            if points[0].kl:
                fill = "none" if is_estimated else style["color"]
                _curve(axes, x, placed, label, marker=plots.marker(index), mfc=fill, **style)
            for place in x if not points[0].kl else ():
                axes.axvline(place, label=label, linewidth=1, **style)
    for axes in panels:
        axes.set_yscale("log")
    cost = "KL(dense ‖ system), nats a token"
    plots.label(panels[0], x="median decode step (ms)", y=cost)
    plots.label(panels[1], x="tokens a second and GPU")
    figure.suptitle(found.conditions.title, fontsize=10)
    plots.legend(figure, panels, "lower center")
    return figure


def _label(point: Point) -> str:
    notes = ["estimated"] if point.is_estimated else []
    notes += [f"{point.gpus} GPUs"] if point.gpus > 1 else []
    notes += [] if point.kl else ["attends to all"]
    return f"{point.curve} ({', '.join(notes)})" if notes else point.curve


def _curve(
    axes: Any, x: Sequence[float], points: Sequence[Point], label: str, **style: Any
) -> None:
    """Means over texts, with intervals where there are several, and the share at each point."""
    mean = np.array([np.mean(point.kl) for point in points])
    ends = np.array(
        [
            statistics.mean(np.array(point.kl))[1:] if len(point.kl) > 1 else [value] * 2
            for point, value in zip(points, mean, strict=True)
        ]
    ).reshape(-1, 2)
    errors = np.abs(ends.T - mean)
    axes.errorbar(x, mean, errors, label=label, capsize=2, linewidth=1.2, markersize=5, **style)
    for place, value, point in zip(x, mean, points, strict=True):
        offset = {"xytext": (5, 4), "textcoords": "offset points"}
        axes.annotate(point.share, (place, value), fontsize=7, color=style["color"], **offset)


def write(found: Tradeoff, output: Path) -> list[Path]:
    """Write tradeoff.json, tradeoff.md and, with Matplotlib, the plot; the files."""
    files = write_report(output, "tradeoff", found, markdown(found))
    return [*files, *(plots.save(draw(found), output / "tradeoff") if plots.can_draw() else ())]
