"""Writes what `profile_tpot` measured: JSON, Markdown tables and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy

from scripts.shared import plots
from scripts.shared.models import model_config, model_shape
from scripts.shared.report import number, percent, table_of, write_report
from scripts.speed.experiments import TABLE2, TABLE2_FLOOR, Table2Row
from scripts.speed.jobs import Job, Shape
from scripts.speed.records import Measurement, Results, Wire

FLOOR = "floor"
"""The system that the others are compared with."""

EXCHANGE: dict[str, Callable[[Wire], str]] = {
    "late steps": lambda wire: percent(wire.late_share),
    "wait ms": lambda wire: number(wire.wait_ms),
    "up MB/step": lambda wire: number(wire.up_bytes / 1e6),
    "down MB/step": lambda wire: number(wire.down_bytes / 1e6),
    "bulk GB": lambda wire: number(wire.bulk_bytes / 1e9),
}
"""The columns of what the exchange did."""


def write_results(results: Results, out: Path) -> list[Path]:
    """Write the measurements and the tables into a folder; the files that were written."""
    return write_report(out, "results", results, markdown(results))


def read_results(path: Path) -> Results:
    """Read a `results.json`."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def floor_of(results: Results, model: str, system: str, batch: int) -> float | None:
    """Milliseconds per token of a batch with only the budget in its context.

    Of several floors it is the one with most of the system's changes, and with no other changes.
    """
    floors = {
        _changes(m.system): m.tpot_ms
        for m in results.measurements
        if m.model == model and _is_floor(m) and m.shape.batch == batch and m.tpot_ms
    }
    alike = [changes for changes in floors if changes <= _changes(system)]
    return floors[max(alike, key=len)] if alike else None


def _is_floor(measurement: Measurement) -> bool:
    return measurement.system.partition(":")[0] == FLOOR


def _changes(label: str) -> frozenset[str]:
    """The arguments that a label changes, also one of a system that is no more."""
    return frozenset(filter(None, label.partition(":")[2].split(",")))


def markdown(results: Results) -> str:
    """All tables."""
    machine = results.machine
    gpus = machine.get("gpus") or []
    kinds = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("sglang", "torch") if name in machine
    )
    parts = [
        "# Time per output token",
        *(f"`{command}`" for command in results.commands),
        ", ".join(filter(None, (*kinds, machine.get("platform", ""), versions))),
        "TPOT is the median decode step of the batch (p10–p90); all systems are measured from the "
        "same stream of tokens.",
    ]
    for model in dict.fromkeys(m.model for m in results.measurements):
        of_model = [m for m in results.measurements if m.model == model]
        parts += [f"## {model}", tpot_table(results, of_model)]
        if any(m.trace for m in of_model):
            parts += ["Both ranks, from the trace:", trace_table(of_model)]
        if any(m.arrival for m in of_model):
            parts += ["Steps while the prompt of one more request is shipped:"]
            parts += [arrival_table(of_model)]
    if results.experiment == "table2":
        parts += ["## Cache management beside inference", table2_table(results)]
    if results.experiment == "quest-time":
        parts += ["## Share of a decode step that selecting pages takes", quest_table(results)]
    return "\n\n".join(parts)


def tpot_table(results: Results, measurements: Sequence[Measurement]) -> str:
    """One line a measurement."""

    def row(m: Measurement) -> dict[str, str]:
        shape = f"{m.shape.title} (largest batch)" if m.capacity_search else m.shape.title
        cells = {"batch × context": shape, "system": m.system}
        if m.failure:
            return cells | {"TPOT ms": m.failure.replace("|", "/")}
        floor = floor_of(results, m.model, m.system, m.shape.batch)
        return cells | {
            "TPOT ms": number(m.tpot_ms),
            "p10–p90": f"{number(m.p10_ms)}–{number(m.p90_ms)}",
            "mean ms": number(m.mean_ms),
            "tokens/s": number(m.tokens_per_second, 0),
            "over floor": number(m.tpot_ms / floor if floor and m.tpot_ms else None),
            "attended": number(m.attended_tokens, 0),
            "sparse steps": number(m.sparse_steps, 0),
            **{name: cell(m.wire) if m.wire else "–" for name, cell in EXCHANGE.items()},
            "prefill s": number(m.prefill_seconds, 1),
            "GiB per GPU": " + ".join(number(used, 1) for used in m.memory_gib) or "–",
        }

    return table_of(map(row, sorted(measurements, key=lambda m: (m.shape.context, m.shape.batch))))


def arrival_table(measurements: Sequence[Measurement]) -> str:
    """What an arrival costs the requests that decode."""
    return table_of(
        {
            "batch × context": m.shape.title,
            "system": m.system,
            "TPOT ms": number(m.tpot_ms),
            "steps": str(m.arrival.steps),
            "median ms": number(m.arrival.median_ms),
            "longest ms": number(m.arrival.longest_ms),
        }
        for m in measurements
        if m.arrival
    )


def trace_table(measurements: Sequence[Measurement]) -> str:
    """Medians of each kind of event, and what of the waiting a step sees."""
    names = sorted({name for m in measurements if m.trace for name in m.trace.median_us})
    return table_of(
        {
            "batch × context": m.shape.title,
            "system": m.system,
            "steps": str(m.trace.steps),
            "step ms": number(m.trace.step_ms),
            "cache management ms": number(m.trace.management_ms),
            "waits p50": percent(m.trace.wait_share_p50, 2),
            "waits p99": percent(m.trace.wait_share_p99, 2),
            **{f"{name} µs": number(m.trace.median_us.get(name), 0) for name in names},
        }
        for m in measurements
        if m.trace
    )


def table2_times(results: Results, row: Table2Row) -> tuple[float | None, float | None]:
    """Milliseconds of inference over the budget, and of cache management, per decode step."""
    floor = results.tpot_ms(row.model, TABLE2_FLOOR, row.floor)
    return floor, results.tpot_ms(row.model, row.system, row.shape)


def table2_table(results: Results) -> str:
    """AsyncSpade Table 2: times per message, that is per packed layers.

    Inference is a decode step over the budget alone, cache management the step of a cache rank
    alone. The bandwidth that hides the answers is given for what was shipped (the tokens that
    changed) and for all selected tokens, as in the paper.
    """

    def cells(row: Table2Row) -> dict[str, str]:
        shape = model_shape(model_config(row.model))
        part = row.layers_per_group / shape.layers
        inference, management = table2_times(results, row)
        ours = results.find(row.model, row.system, row.shape)
        shipped = ours.wire.down_bytes if ours and ours.wire else None
        everything = row.shape.batch * row.budget * shape.bytes_per_token
        return {
            "model": row.model,
            "batch × context, k": f"{row.shape.title}, {row.budget}",
            "layers per message": str(row.layers_per_group),
            "inference ms": number(inference and inference * part),
            "cache management ms": number(management and management * part),
            "share": number(inference and management and management / inference),
            "GB/s, changed tokens": number(inference and shipped and shipped / inference / 1e6),
            "GB/s, all k tokens": number(inference and everything / inference / 1e6),
        }

    return table_of(map(cells, TABLE2))


def quest_share(results: Results, model: str, shape: Shape) -> float | None:
    """The part of a step that is spent on choosing pages: all but what a fixed window costs."""
    quest, window = (results.tpot_ms(model, system, shape) for system in ("quest", "window"))
    return (quest - window) / quest if quest and window else None


def quest_table(results: Results) -> str:
    """AsyncSpade Fig. 2 as a table."""
    return table_of(
        {
            "model": model,
            "batch × context": shape.title,
            "quest ms": number(results.tpot_ms(model, "quest", shape)),
            "window ms": number(results.tpot_ms(model, "window", shape)),
            "share": percent(quest_share(results, model, shape)),
        }
        for model, shape in dict.fromkeys((m.model, m.shape) for m in results.measurements)
    )


def write_plots(results: Results, out: Path) -> list[Path]:
    """Draw what was measured; nothing if Matplotlib is not installed."""
    if not plots.can_draw():
        return []
    models = list(dict.fromkeys(m.model for m in results.measurements if m.tpot_ms))
    files = [path for model in models for path in tpot_plot(results, model, out)]
    if results.experiment == "table2":
        inference, management = zip(*(table2_times(results, row) for row in TABLE2), strict=True)
        groups = [
            f"{row.model}\n{row.shape.title}\nk {row.budget}, {row.layers_per_group} layers"
            for row in TABLE2
        ]
        series = {"inference over k tokens": inference, "cache management": management}
        title = "Cache management beside the inference that hides it"
        files += grouped_bars(out / "table2", groups, series, "per decode step (ms)", title, "")
    if results.experiment == "quest-time" and models:
        shapes = list(dict.fromkeys(m.shape for m in results.measurements))
        shares = {model: [quest_share(results, model, s) for s in shapes] for model in models}
        percents = {model: [s and 100 * s for s in shares[model]] for model in models}
        labels = ("share of a decode step (%)", "Selecting pages before attention")
        titles = [shape.title for shape in shapes]
        files += grouped_bars(out / "quest-time", titles, percents, *labels)
    return files


def tpot_plot(results: Results, model: str, out: Path) -> list[Path]:
    """Draw the decode steps of all systems, and the floor without changes as a line."""
    measured = [
        m for m in results.measurements if m.model == model and m.tpot_ms and not _is_floor(m)
    ]
    if not measured:
        return []
    shapes = sorted({m.shape for m in measured}, key=lambda s: (s.context, s.batch))
    series = {
        system: [results.tpot_ms(model, system, shape) for shape in shapes]
        for system in dict.fromkeys(m.system for m in measured)
    }
    floors = [floor_of(results, model, FLOOR, shape.batch) for shape in shapes]
    name, titles = Path(model).name, [shape.title for shape in shapes]
    labels = ("median decode step (ms)", f"{name}: time per output token")
    return grouped_bars(out / f"tpot-{name}", titles, series, *labels, floors=floors)


def grouped_bars(
    stem: Path,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    value_label: str,
    title: str,
    group_label: str = "batch × context",
    floors: Sequence[float | None] = (),
) -> list[Path]:
    """A bar for each group and series, and a line across each group that has a floor."""
    width, places = 0.8 / len(series), numpy.arange(len(groups))
    wide = max(7.0, 1.0 + 0.5 * len(groups) * (len(series) + 1))
    figure, (axes,) = plots.panels(1, (wide, 4.0 + 0.25 * len(series)))
    for index, (name, values) in enumerate(series.items()):
        heights = numpy.array(values, float)  # None is not a number, and no bar
        left = places - 0.4 + index * width
        colour = plots.colour(index)
        bars = axes.bar(left, heights, width, align="edge", label=name, color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    for place, floor in enumerate(floors):
        if floor is not None:
            label = "floor: only the budget in context"
            axes.hlines(floor, place - 0.45, place + 0.45, "black", "dashed", label=label)
    axes.set_xticks(places, groups)
    plots.label(axes, title, group_label, value_label)
    plots.legend(figure, [axes], "lower center")
    return plots.save(figure, stem, ("png",))


def describe_jobs(jobs: Sequence[Job]) -> str:
    """The engines and their arguments, for a dry run."""
    lines = []
    for job in jobs:
        shapes = [str(shape) for shape in job.shapes]
        if job.capacity:
            shapes.append(f"largest batch of {job.capacity}")
        lines.append(f"{job.model}  {job.system}  {job.gpus} GPUs  {' '.join(shapes)}")
        lines.append(f"    {json.dumps(job.engine)}")
    return "\n".join(lines)
