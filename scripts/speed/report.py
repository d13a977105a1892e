"""Writes what `profile_tpot` measured: JSON, Markdown tables and plots."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripts.shared.presentation import COLOURS, number, table
from scripts.speed.jobs import TABLE2, TABLE2_FLOOR, Job, Shape, Table2Row, model_config
from scripts.speed.records import Measurement, Results, Wire


def write_results(results: Results, out: Path) -> list[Path]:
    """Write the measurements and the tables into a folder; the files that were written."""
    out.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=2)
    files = {"results.json": encoded.decode(), "results.md": markdown(results)}
    for name, text in files.items():
        # The machine may stop at any time: never leave half a file.
        unfinished = out / f".{name}"
        unfinished.write_text(text + "\n")
        unfinished.replace(out / name)
    return [out / name for name in files]


def read_results(path: Path) -> Results:
    """Read a `results.json`."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def floor_of(results: Results, measurement: Measurement) -> float | None:
    """Milliseconds per token of the same batch with only the budget in its context."""
    floors = {
        m.shape.batch: m.tpot_ms
        for m in results.measurements
        if m.model == measurement.model and m.system.startswith("floor")
    }
    return floors.get(measurement.shape.batch)


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
        parts += [f"## {model}", tpot_table(results, model)]
        traced = [m for m in results.measurements if m.model == model and m.trace]
        if traced:
            parts += ["Both ranks, from the trace:", trace_table(traced)]
        arrivals = [m for m in results.measurements if m.model == model and m.arrival]
        if arrivals:
            parts += ["Steps while the prompt of one more request is shipped:"]
            parts += [arrival_table(arrivals)]
    if results.experiment == "table2":
        parts += ["## Cache management beside inference", table2_table(results)]
    if results.experiment == "quest-time":
        parts += ["## Share of a decode step that selecting pages takes", quest_table(results)]
    return "\n\n".join(parts)


def tpot_table(results: Results, model: str) -> str:
    """One line a measurement."""
    header = [
        *("batch × context", "system", "TPOT ms", "p10–p90", "mean ms", "tokens/s", "over floor"),
        *(
            "attended",
            "sparse steps",
            "late steps",
            "wait ms",
            "up MB/step",
            "down MB/step",
            "bulk GB",
        ),
        *("prefill s", "GiB per GPU"),
    ]
    rows = []
    of_model = [m for m in results.measurements if m.model == model]
    for m in sorted(of_model, key=lambda m: (m.shape.context, m.shape.batch)):
        shape = f"{m.shape.batch} × {m.shape.context}"
        if m.capacity_search:
            shape += " (largest batch)"
        if m.failure:
            rows.append([shape, m.system, m.failure.replace("|", "/"), *[""] * (len(header) - 3)])
            continue
        floor = floor_of(results, m)
        rows.append(
            [
                shape,
                m.system,
                number(m.tpot_ms),
                f"{number(m.p10_ms)}–{number(m.p90_ms)}",
                number(m.mean_ms),
                number(m.tokens_per_second, 0),
                number(m.tpot_ms / floor if floor and m.tpot_ms else None),
                number(m.attended_tokens, 0),
                number(m.sparse_steps, 0),
                *wire_cells(m.wire),
                number(m.prefill_seconds, 1),
                " + ".join(number(used, 1) for used in m.memory_gib) or "–",
            ]
        )
    return table(header, rows)


def wire_cells(wire: Wire | None) -> list[str]:
    """The columns of the exchange."""
    if wire is None:
        return ["–"] * 5
    return [
        f"{100 * wire.late_share:.1f} %",
        number(wire.wait_ms),
        number(wire.up_bytes / 1e6),
        number(wire.down_bytes / 1e6),
        number(wire.bulk_bytes / 1e9),
    ]


def arrival_table(measurements: Sequence[Measurement]) -> str:
    """What an arrival costs the requests that decode."""
    header = ["batch × context", "system", "TPOT ms", "steps", "median ms", "longest ms"]
    rows = []
    for m in measurements:
        assert m.arrival is not None
        rows.append(
            [
                f"{m.shape.batch} × {m.shape.context}",
                m.system,
                number(m.tpot_ms),
                str(m.arrival.steps),
                number(m.arrival.median_ms),
                number(m.arrival.longest_ms),
            ]
        )
    return table(header, rows)


def trace_table(traced: Sequence[Measurement]) -> str:
    """Medians of each kind of event, and what of the waiting a step sees."""
    names = sorted({name for m in traced if m.trace for name in m.trace.median_us})
    header = [
        *("batch × context", "system", "steps", "step ms", "cache management ms"),
        *("waits p50", "waits p99", *(f"{name} µs" for name in names)),
    ]
    rows = []
    for m in traced:
        trace = m.trace
        assert trace is not None
        shares = (trace.wait_share_p50, trace.wait_share_p99)
        rows.append(
            [
                f"{m.shape.batch} × {m.shape.context}",
                m.system,
                str(trace.steps),
                number(trace.step_ms),
                number(trace.management_ms),
                *("–" if share is None else f"{100 * share:.2f} %" for share in shares),
                *(number(trace.median_us.get(name), 0) for name in names),
            ]
        )
    return table(header, rows)


def table2_times(results: Results, row: Table2Row) -> tuple[float | None, float | None]:
    """Milliseconds of inference over the budget, and of cache management, per decode step."""
    floor = results.tpot_ms(row.model, TABLE2_FLOOR, row.floor)
    return floor, results.tpot_ms(row.model, row.system, row.shape)


def table2_table(results: Results) -> str:
    """AsyncSpade Table 2: times per message, that is per packed layers.

    Inference is a decode step over the budget alone, cache management the step of a cache rank
    alone. The bandwidth that hides the answers is given
    for what was shipped (the tokens that changed) and for all selected tokens, as in the paper.
    """
    header = [
        *("model", "batch × context, k", "layers per message", "inference ms"),
        *("cache management ms", "share", "GB/s, changed tokens", "GB/s, all k tokens"),
    ]
    rows = []
    for row in TABLE2:
        _, config = model_config(row.model)
        layers = config["num_hidden_layers"]
        part = row.layers_per_group / layers
        inference, management = table2_times(results, row)
        ours = results.find(row.model, row.system, row.shape)
        shipped = ours.wire.down_bytes if ours and ours.wire else None
        per_token = 2 * 2 * layers * config["num_key_value_heads"] * head_dim(config)
        everything = row.shape.batch * row.budget * per_token
        rows.append(
            [
                row.model,
                f"{row.shape.batch} × {row.shape.context}, {row.budget}",
                str(row.layers_per_group),
                number(inference and inference * part),
                number(management and management * part),
                number(inference and management and management / inference),
                number(inference and shipped and shipped / inference / 1e6),
                number(inference and everything / inference / 1e6),
            ]
        )
    return table(header, rows)


def head_dim(config: dict[str, Any]) -> int:
    """D of a model's configuration."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def quest_share(results: Results, model: str, shape: Shape) -> float | None:
    """Part of a step that is spent on choosing pages: all but what a fixed window costs."""
    quest, window = (results.tpot_ms(model, system, shape) for system in ("quest", "window"))
    return (quest - window) / quest if quest and window else None


def quest_table(results: Results) -> str:
    """AsyncSpade Fig. 2 as a table."""
    rows = []
    for model, shape in dict.fromkeys((m.model, m.shape) for m in results.measurements):
        share = quest_share(results, model, shape)
        rows.append(
            [
                model,
                f"{shape.batch} × {shape.context}",
                number(results.tpot_ms(model, "quest", shape)),
                number(results.tpot_ms(model, "window", shape)),
                "–" if share is None else f"{100 * share:.1f} %",
            ]
        )
    return table(("model", "batch × context", "quest ms", "window ms", "share"), rows)


def write_plots(results: Results, out: Path) -> list[Path]:
    """Draw what was measured; nothing if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError:
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
        floors = [floor_of(results, Measurement(model, "", shape)) for shape in shapes]
        if shapes:
            path = out / f"tpot-{Path(model).name}.png"
            labels = [f"{shape.batch} × {shape.context}" for shape in shapes]
            title = f"{Path(model).name}: time per output token"
            grouped_bars(
                path, title, labels, series, "median decode step (ms)", "batch × context", floors
            )
            files.append(path)
    if results.experiment == "table2":
        times = [table2_times(results, row) for row in TABLE2]
        labels = [
            f"{row.model}\n{row.shape.batch} × {row.shape.context}\n"
            f"k {row.budget}, {row.layers_per_group} layers"
            for row in TABLE2
        ]
        series = {
            "inference over k tokens": [inference for inference, _ in times],
            "cache management": [management for _, management in times],
        }
        path = out / "table2.png"
        title = "Cache management beside the inference that hides it"
        grouped_bars(path, title, labels, series, "per decode step (ms)", "")
        files.append(path)
    if results.experiment == "quest-time" and models:
        shapes = list(dict.fromkeys(m.shape for m in results.measurements))
        shares = {
            model: [
                None if (share := quest_share(results, model, shape)) is None else 100 * share
                for shape in shapes
            ]
            for model in models
        }
        path = out / "quest-time.png"
        labels = [f"{shape.batch} × {shape.context}" for shape in shapes]
        title = "Selecting pages before attention"
        grouped_bars(path, title, labels, shares, "share of a decode step (%)", "batch × context")
        files.append(path)
    return files


def grouped_bars(
    path: Path,
    title: str,
    groups: Sequence[str],
    series: dict[str, list[float | None]],
    value_label: str,
    group_label: str,
    floors: Sequence[float | None] = (),
) -> None:
    """A bar for each group and series, and a line across each group that has a floor."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    width = 0.8 / max(1, len(series))
    wide = max(7.0, 1.0 + 0.5 * len(groups) * (len(series) + 1))
    figure, axes = pyplot.subplots(figsize=(wide, 4.0 + 0.25 * len(series)), layout="constrained")
    for index, (name, values) in enumerate(series.items()):
        places = [group - 0.4 + (index + 0.5) * width for group in range(len(groups))]
        there = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
        colour = COLOURS[index % len(COLOURS)]
        bars = axes.bar(
            [x for x, _ in there], [y for _, y in there], width, label=name, color=colour
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    drawn = False
    for group, floor in enumerate(floors):
        if floor is not None:
            label = None if drawn else "floor: only the budget in context"
            axes.hlines(floor, group - 0.45, group + 0.45, "black", "dashed", label=label)
            drawn = True
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(value_label)
    axes.set_xlabel(group_label)
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


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
