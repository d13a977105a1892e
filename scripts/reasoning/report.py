"""Writes what `profile_reasoning` measured: JSON, Markdown tables, and a plot."""

from __future__ import annotations

from pathlib import Path

from scripts.reasoning.measures import Measurement, Results
from scripts.shared import plots
from scripts.shared.report import number, percent, provenance, table_of, write_report

EXPLANATION = """\
A load is STREAMSxPROMPT+ANSWER in tokens. Tokens/s is from the first request sent to the last
token. TTFT and TPOT are of requests. The gap is the longest time that a stream was silent after its
first token, and its context then. Sparse are the requests that were sparse at all, and the share of
all tokens that sparse steps wrote. Of several runs, all but the gap is of the one of median speed.

By context: tokens/s of all streams together by their mean context, while 90 % of them decode."""


def write_results(results: Results, out: Path) -> list[Path]:
    """Write results.json, results.md and a plot; the files."""
    loads: dict[str, list[Measurement]] = {}
    for measurement in results.measurements:
        if not measurement.failure:
            loads.setdefault(measurement.load, []).append(measurement)
    parts = [
        f"# Reasoning loads: {results.jobs[0].settings.model}",
        provenance(results.commands, results.machine),
        EXPLANATION,
        table_of(map(_row, results.measurements)),
        *map(_curves, loads.values()),
    ]
    files = write_report(out, "results", results, "\n\n".join(parts))
    return files + (_plot(loads, out) if loads and plots.can_draw() else [])


def _row(m: Measurement) -> dict[str, str]:
    cells = {"load": m.load, "system": m.system}
    if m.failure:
        return cells | {"tokens/s": m.failure.replace("|", "/")}
    run, gap = m.median, max(run.gap for run in m.runs)
    speeds = [run.tokens_per_second for run in m.runs]
    return cells | {
        "tokens/s": number(run.tokens_per_second, 0),
        "spread": f"{number(min(speeds), 0)}–{number(max(speeds), 0)}",
        "tokens": str(run.tokens),
        "seconds": number(run.seconds, 1),
        "TTFT s p50, p99": f"{number(run.ttft_p50)}, {number(run.ttft_p99)}",
        "TPOT ms p50, p99": f"{number(1e3 * run.tpot_p50)}, {number(1e3 * run.tpot_p99)}",
        "longest gap": f"{number(gap.seconds, 3)} s at {gap.context}",
        "sparse": f"{run.sparse_requests} of {run.requests}, {percent(run.sparse_share)}",
        "GiB per GPU": " + ".join(number(used, 1) for used in m.memory_gib) or "–",
        "client busy": percent(run.client_share, 0),
    }


def _curves(measurements: list[Measurement]) -> str:
    """Tokens/s of one load by context, a column a system."""
    curves = {m.system: m.median.curve for m in measurements}
    return table_of(
        {
            "load": measurements[0].load,
            "context from": str(context),
            **{system: number(curve.get(context), 0) for system, curve in curves.items()},
        }
        for context in sorted(set().union(*curves.values()))
    )


def _plot(loads: dict[str, list[Measurement]], out: Path) -> list[Path]:
    """Draw tokens/s by context, a panel a load."""
    figure, panels = plots.panels(len(loads), (3 + 3.5 * len(loads), 3.6))
    for axes, (load, measurements) in zip(panels, loads.items(), strict=True):
        for index, m in enumerate(measurements):
            style = {"color": plots.colour(index), "marker": plots.marker(index), "markersize": 4}
            curve = m.median.curve
            axes.plot(list(curve), list(curve.values()), label=m.system, **style)
        axes.set_ylim(bottom=0)
        plots.label(axes, load, "mean context", "tokens/s of all streams")
    plots.legend(figure, panels)
    return plots.save(figure, out / "tokens-by-context")
