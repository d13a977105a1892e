"""Writes what `profile_tpot` measured: JSON and Markdown tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from scripts.shared.report import number, percent, provenance, table_of, write_report
from scripts.speed.records import Measurement, Wire
from scripts.speed.serving import Results

EXCHANGE: dict[str, Callable[[Wire], str]] = {
    "late steps": lambda wire: percent(wire.late_share),
    "wait ms": lambda wire: number(wire.wait_ms),
    "up MB/step": lambda wire: number(wire.up_bytes / 1e6),
    "down MB/step": lambda wire: number(wire.down_bytes / 1e6),
    "bulk GB": lambda wire: number(wire.bulk_bytes / 1e9),
}
"""The columns of what the exchange did."""


def read_results(out: Path) -> Results:
    """What a folder holds that was measured, less the failures."""
    if not (file := out / "results.json").is_file():
        return Results([], {})
    results = msgspec.json.decode(file.read_bytes(), type=Results)
    measurements = msgspec.convert(results.measurements, list[Measurement])
    results.measurements = [one for one in measurements if not one.failure]
    return results


def write_results(results: Results, out: Path) -> list[Path]:
    """Write the measurements and the tables into a folder; the files that were written."""
    by_shape = sorted(results.measurements, key=lambda m: (m.shape.context, m.shape.batch))
    parts = [
        f"# Time per output token: {results.conditions['model']}",
        provenance(results.commands, results.machine),
        "TPOT is the median decode step of the batch (p10–p90), and its spread is that of the "
        "windows' medians; all systems are measured from the same stream of tokens.",
        table_of(_row(measurement, results) for measurement in by_shape),
    ]
    return write_report(out, "results", results, "\n\n".join(parts))


def _row(m: Measurement, results: Results) -> dict[str, str]:
    cells = {"batch × context": f"{m.shape.batch} × {m.shape.context}", "system": m.system}
    if m.failure:
        return cells | {"TPOT ms": m.failure}
    floor = floor_of(results, m.system, m.shape.batch)
    return cells | {
        "TPOT ms": number(m.tpot_ms),
        "spread": f"{number(min(m.medians))}–{number(max(m.medians))}",
        "p10–p90": f"{number(m.p10_ms)}–{number(m.p90_ms)}",
        "mean ms": number(m.mean_ms),
        "tokens/s": number(m.tokens_per_second, 0),
        "over floor": number(m.tpot_ms / floor if floor and m.tpot_ms else None),
        "attended": number(m.attended_tokens, 0),
        "sparse steps": number(m.sparse_steps, 0),
        **{name: cell(m.wire) if m.wire else "–" for name, cell in EXCHANGE.items()},
        "prefill s": number(m.prefill_seconds, 1),
        "GiB per GPU": m.memory,
    }


def floor_of(results: Results, system: str, batch: int) -> float | None:
    """Milliseconds per token of a batch with only the budget in its context.

    Of several floors it is the one with most of the system's changes, and with no other changes.
    """
    floors = {
        _changes(m.system): m.tpot_ms
        for m in results.measurements
        if m.system.partition(":")[0] == "floor" and m.shape.batch == batch and m.tpot_ms
    }
    alike = [changes for changes in floors if changes <= _changes(system)]
    return floors[max(alike, key=len)] if alike else None


def _changes(label: str) -> frozenset[str]:
    """The arguments that a label changes."""
    return frozenset(filter(None, label.partition(":")[2].split(",")))
