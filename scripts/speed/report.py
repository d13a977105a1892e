"""Writes what `profile_tpot` measured: JSON, Markdown tables and plots."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from scripts.shared import plots
from scripts.shared.models import model_config, model_shape
from scripts.shared.report import number, percent, table, write_report
from scripts.speed.experiments import TABLE2, TABLE2_FLOOR, Table2Row
from scripts.speed.jobs import Job, Shape
from scripts.speed.records import Measurement, Results, Wire

SHAPE_AND_SYSTEM = ("batch × context", "system")


def write_results(results: Results, out: Path) -> list[Path]:
    """Write the measurements and the tables into a folder; the files that were written."""
    return write_report(out, "results", results, markdown(results))


def read_results(path: Path) -> Results:
    """Read a `results.json`."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def floor_of(results: Results, model: str, batch: int) -> float | None:
    """Milliseconds per token of a batch with only the budget in its context."""
    floors = [
        m.tpot_ms
        for m in results.measurements
        if m.model == model and m.system.startswith("floor") and m.shape.batch == batch
    ]
    return floors[-1] if floors else None


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
        f"`{shlex.join(results.command)}`",
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
    header = [
        *(*SHAPE_AND_SYSTEM, "TPOT ms", "p10–p90", "mean ms", "tokens/s", "over floor"),
        *("attended", "sparse steps", "late steps", "wait ms", "up MB/step", "down MB/step"),
        *("bulk GB", "prefill s", "GiB per GPU"),
    ]
    rows = []
    for m in sorted(measurements, key=lambda m: (m.shape.context, m.shape.batch)):
        shape = f"{m.shape.title} (largest batch)" if m.capacity_search else m.shape.title
        if m.failure:
            rows.append([shape, m.system, m.failure.replace("|", "/"), *[""] * (len(header) - 3)])
            continue
        floor = floor_of(results, m.model, m.shape.batch)
        rows.append(
            [
                *(shape, m.system, number(m.tpot_ms), f"{number(m.p10_ms)}–{number(m.p90_ms)}"),
                *(number(m.mean_ms), number(m.tokens_per_second, 0)),
                number(m.tpot_ms / floor if floor and m.tpot_ms else None),
                *(number(m.attended_tokens, 0), number(m.sparse_steps, 0), *wire_cells(m.wire)),
                number(m.prefill_seconds, 1),
                " + ".join(number(used, 1) for used in m.memory_gib) or "–",
            ]
        )
    return table(header, rows)


def wire_cells(wire: Wire | None) -> list[str]:
    """The columns of the exchange."""
    if wire is None:
        return ["–"] * 5
    megabytes = (wire.up_bytes / 1e6, wire.down_bytes / 1e6, wire.bulk_bytes / 1e9)
    return [percent(wire.late_share), number(wire.wait_ms), *map(number, megabytes)]


def arrival_table(measurements: Sequence[Measurement]) -> str:
    """What an arrival costs the requests that decode."""
    rows = [
        [
            *(m.shape.title, m.system, number(m.tpot_ms), str(m.arrival.steps)),
            *(number(m.arrival.median_ms), number(m.arrival.longest_ms)),
        ]
        for m in measurements
        if m.arrival
    ]
    return table([*SHAPE_AND_SYSTEM, "TPOT ms", "steps", "median ms", "longest ms"], rows)


def trace_table(measurements: Sequence[Measurement]) -> str:
    """Medians of each kind of event, and what of the waiting a step sees."""
    names = sorted({name for m in measurements if m.trace for name in m.trace.median_us})
    header = [
        *(*SHAPE_AND_SYSTEM, "steps", "step ms", "cache management ms"),
        *("waits p50", "waits p99", *(f"{name} µs" for name in names)),
    ]
    rows = [
        [
            *(m.shape.title, m.system, str(m.trace.steps)),
            *(number(m.trace.step_ms), number(m.trace.management_ms)),
            *(percent(m.trace.wait_share_p50, 2), percent(m.trace.wait_share_p99, 2)),
            *(number(m.trace.median_us.get(name), 0) for name in names),
        ]
        for m in measurements
        if m.trace
    ]
    return table(header, rows)


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
    header = [
        *("model", "batch × context, k", "layers per message", "inference ms"),
        *("cache management ms", "share", "GB/s, changed tokens", "GB/s, all k tokens"),
    ]
    rows = []
    for row in TABLE2:
        shape = model_shape(model_config(row.model))
        part = row.layers_per_group / shape.layers
        inference, management = table2_times(results, row)
        ours = results.find(row.model, row.system, row.shape)
        shipped = ours.wire.down_bytes if ours and ours.wire else None
        everything = row.shape.batch * row.budget * shape.bytes_per_token
        rows.append(
            [
                *(row.model, f"{row.shape.title}, {row.budget}", str(row.layers_per_group)),
                number(inference and inference * part),
                number(management and management * part),
                number(inference and management and management / inference),
                number(inference and shipped and shipped / inference / 1e6),
                number(inference and everything / inference / 1e6),
            ]
        )
    return table(header, rows)


def quest_share(results: Results, model: str, shape: Shape) -> float | None:
    """The part of a step that is spent on choosing pages: all but what a fixed window costs."""
    quest, window = (results.tpot_ms(model, system, shape) for system in ("quest", "window"))
    return (quest - window) / quest if quest and window else None


def quest_table(results: Results) -> str:
    """AsyncSpade Fig. 2 as a table."""
    rows = [
        [
            *(model, shape.title),
            *(number(results.tpot_ms(model, system, shape)) for system in ("quest", "window")),
            percent(quest_share(results, model, shape)),
        ]
        for model, shape in dict.fromkeys((m.model, m.shape) for m in results.measurements)
    ]
    return table(("model", "batch × context", "quest ms", "window ms", "share"), rows)


def write_plots(results: Results, out: Path) -> list[Path]:
    """Draw what was measured; nothing if Matplotlib is not installed."""
    if not plots.can_draw():
        return []
    files = []
    models = list(dict.fromkeys(m.model for m in results.measurements if m.tpot_ms))
    for model in models:
        measured = [
            m
            for m in results.measurements
            if m.model == model and m.tpot_ms and not m.system.startswith("floor")
        ]
        shapes = sorted({m.shape for m in measured}, key=lambda s: (s.context, s.batch))
        series = {
            system: [results.tpot_ms(model, system, shape) for shape in shapes]
            for system in dict.fromkeys(m.system for m in measured)
        }
        floors = [floor_of(results, model, shape.batch) for shape in shapes]
        name = Path(model).name
        if shapes:
            labels = ("median decode step (ms)", f"{name}: time per output token")
            titles = [shape.title for shape in shapes]
            files += grouped_bars(out / f"tpot-{name}", titles, series, *labels, floors=floors)
    if results.experiment == "table2":
        times = [table2_times(results, row) for row in TABLE2]
        groups = [
            f"{row.model}\n{row.shape.title}\nk {row.budget}, {row.layers_per_group} layers"
            for row in TABLE2
        ]
        series = {
            "inference over k tokens": [inference for inference, _ in times],
            "cache management": [management for _, management in times],
        }
        title = "Cache management beside the inference that hides it"
        files += grouped_bars(out / "table2", groups, series, "per decode step (ms)", title, "")
    if results.experiment == "quest-time" and models:
        shapes = list(dict.fromkeys(m.shape for m in results.measurements))
        shares = {
            model: [
                None if (share := quest_share(results, model, shape)) is None else 100 * share
                for shape in shapes
            ]
            for model in models
        }
        labels = ("share of a decode step (%)", "Selecting pages before attention")
        titles = [shape.title for shape in shapes]
        files += grouped_bars(out / "quest-time", titles, shares, *labels)
    return files


def grouped_bars(
    stem: Path,
    groups: Sequence[str],
    series: dict[str, list[float | None]],
    value_label: str,
    title: str,
    group_label: str = "batch × context",
    floors: Sequence[float | None] = (),
) -> list[Path]:
    """A bar for each group and series, and a line across each group that has a floor."""
    width = 0.8 / max(1, len(series))
    wide = max(7.0, 1.0 + 0.5 * len(groups) * (len(series) + 1))
    figure, (axes,) = plots.panels(1, (wide, 4.0 + 0.25 * len(series)))
    for index, (name, values) in enumerate(series.items()):
        places = [group - 0.4 + (index + 0.5) * width for group in range(len(groups))]
        there = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
        heights = [y for _, y in there]
        bars = axes.bar(
            [x for x, _ in there], heights, width, label=name, color=plots.colour(index)
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    for group, floor in enumerate(floors):
        if floor is not None:
            label = "floor: only the budget in context"
            axes.hlines(floor, group - 0.45, group + 0.45, "black", "dashed", label=label)
    axes.set_xticks(range(len(groups)), groups)
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
