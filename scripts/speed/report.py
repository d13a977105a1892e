"""Writes what `profile_tpot` measured: JSON and Markdown tables."""

from __future__ import annotations

from pathlib import Path

import msgspec

from scripts.shared.report import number, provenance, table_of, write_report
from scripts.speed.records import Measurement
from scripts.speed.serving import Results


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
        table_of(map(_row, by_shape)),
    ]
    return write_report(out, "results", results, "\n\n".join(parts))


def _row(m: Measurement) -> dict[str, str]:
    cells = {"batch × context": f"{m.shape.batch} × {m.shape.context}", "system": m.system}
    if m.mean_ms is None:
        return cells | {"TPOT ms": m.failure}
    return cells | {
        "TPOT ms": number(m.tpot_ms),
        "spread": f"{number(min(m.medians))}–{number(max(m.medians))}",
        "p10–p90": f"{number(m.p10_ms)}–{number(m.p90_ms)}",
        "mean ms": number(m.mean_ms),
        "tokens/s": number(1e3 * m.shape.batch / m.mean_ms, 0),
        "attended": number(m.attended_tokens, 0),
        "sparse steps": number(m.sparse_steps, 0),
        "prefill s": number(m.prefill_seconds, 1),
        "GiB per GPU": m.memory,
        **{name: number(value) for name, value in m.exchange.items()},
    }
