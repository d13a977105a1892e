"""Writes what `profile_reasoning` measured: JSON, Markdown tables, and a plot."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from scripts.reasoning.measures import Measurement, Run
from scripts.shared.report import number, percent, table_of
from scripts.speed.serving import Results

EXPLANATION = """\
A load is STREAMSxPROMPT+ANSWER in tokens. Tokens/s is from the first request sent to the last
token. TTFT and TPOT are of requests. The gap is the longest time that a stream was silent after its
first token, and its context then. Sparse are the requests that were sparse at all, and the share of
all tokens that sparse steps wrote.

By context: tokens/s of all streams together by their mean context, while 90 % of them decode."""

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def write_results(results: Results, out: Path) -> list[Path]:
    """Write results.json, results.md and a plot, if there is Matplotlib; the files."""
    loads: dict[str, dict[str, Run]] = {}
    for measurement in results.measurements:
        if measurement.run:
            loads.setdefault(measurement.load, {})[measurement.system] = measurement.run
    tables = table_of(map(_row, results.measurements)), *map(_curves, loads, loads.values())
    files = results.write(out, "Reasoning loads", EXPLANATION, *tables)
    if loads and importlib.util.find_spec("matplotlib"):
        files += _plot(loads, out / "tokens-by-context")
    return files


def _row(m: Measurement) -> dict[str, str]:
    cells = {"load": m.load, "system": m.system}
    if not (run := m.run):
        return cells | {"tokens/s": m.failure}
    return cells | {
        "tokens/s": number(run.tokens_per_second, 0),
        "tokens": str(run.tokens),
        "seconds": number(run.seconds, 1),
        "TTFT s p50, p99": f"{number(run.ttft_p50)}, {number(run.ttft_p99)}",
        "TPOT ms p50, p99": f"{number(1e3 * run.tpot_p50)}, {number(1e3 * run.tpot_p99)}",
        "longest gap": f"{number(run.gap.seconds, 3)} s at {run.gap.context}",
        "sparse": f"{run.sparse_requests} of {run.requests}, {percent(run.sparse_share)}",
        "GiB per GPU": m.memory,
        "client busy": percent(run.client_share, 0),
    }


def _curves(load: str, runs: dict[str, Run]) -> str:
    """Tokens/s of one load by context, a column a system."""
    contexts = sorted({context for run in runs.values() for context in run.curve})
    return table_of(
        {
            "load": load,
            "context from": str(context),
            **{system: number(run.curve.get(context), 0) for system, run in runs.items()},
        }
        for context in contexts
    )


def _plot(loads: dict[str, dict[str, Run]], stem: Path) -> list[Path]:
    """Draw tokens/s by context, a panel a load."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure((3 + 3.5 * len(loads), 3.6), layout="constrained")
    panels = figure.subplots(1, len(loads), squeeze=False)[0]
    for axes, (load, runs) in zip(panels, loads.items(), strict=True):
        axes.set_prop_cycle(color=COLOURS, marker=list("osD^vPX*"))
        for system, run in runs.items():
            axes.plot(list(run.curve), list(run.curve.values()), label=system, markersize=4)
        axes.set(title=load, xlabel="mean context", ylabel="tokens/s of all streams")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    files = [stem.with_suffix(f".{kind}") for kind in ("png", "svg")]
    with matplotlib.rc_context({"svg.hashsalt": stem.name}):  # the same figure gives the same bytes
        figure.savefig(files[0], dpi=150)
        figure.savefig(files[1], metadata={"Date": None})
    return files
