"""What `evaluate` found: a line a cell, with intervals, work and memory; JSON, tables and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.residency import FORMATS
from scripts.accuracy import flops, statistics
from scripts.accuracy.flops import ModelSize
from scripts.accuracy.outcomes import Outcome, Result, Run, grouped
from scripts.accuracy.plots import write_plots
from scripts.accuracy.settings import attended_tokens, policy_of
from scripts.accuracy.statistics import Estimate
from scripts.accuracy.tasks import TASKS
from scripts.shared import report
from scripts.shared.models import find_config
from scripts.shared.report import number, percent, table
from scripts.shared.systems import CACHE_RANK, DENSE, SYSTEMS, System, residency_options

HEADER = (
    *("system", "changed", "k", "exact chain", "minus dense", "hop accuracy", "correct prefix"),
    *("output tokens", "sparse steps", "stale", "MFLOPs a token", "bits"),
)


class Report(msgspec.Struct):
    """The content of `results.json`."""

    run: Run
    results: list[Result]


def summarize(outcomes: Iterable[Outcome], run: Run) -> list[Result]:
    """One result a cell of two or more problems, in the order of SYSTEMS and then of budgets.

    A difference to dense decoding is over the problems that both decoded.
    """
    by_cell: dict[Any, dict[int, Outcome]] = {}
    for outcome in outcomes:
        by_cell.setdefault(outcome.cell.key, {})[outcome.seed] = outcome
    results = [
        _result(of_seed, by_cell.get((problems, DENSE), {}), run)
        for (problems, _), of_seed in by_cell.items()
        if len(of_seed) > 1
    ]
    places = list(SYSTEMS)
    return sorted(
        results,
        key=lambda r: (places.index(r.system.name), r.system.changes.get("sparse_budget", 0)),
    )


def _result(of_seed: dict[int, Outcome], dense: dict[int, Outcome], run: Run) -> Result:
    outcomes = [of_seed[seed] for seed in sorted(of_seed)]
    cell, hops = outcomes[0].cell, max(o.hops for o in outcomes)
    sparse = [o.sparse_steps for o in outcomes if o.sparse_steps is not None]
    shared = [] if cell.system == DENSE else sorted(of_seed.keys() & dense.keys())
    exact_difference = None
    if len(shared) > 1:
        ours, theirs = ([found[seed].exact for seed in shared] for found in (of_seed, dense))
        exact_difference = statistics.difference(ours, theirs)
    return Result(
        cell=cell,
        chains=len(outcomes),
        exact=statistics.mean([o.exact for o in outcomes]),
        exact_difference=exact_difference,
        hop_accuracy=statistics.mean([o.correct_hops / o.hops for o in outcomes]),
        correct_prefix=statistics.mean([o.correct_prefix_hops for o in outcomes]),
        hops=hops,
        survival=[
            sum(o.correct_prefix_hops >= hop for o in outcomes) / len(outcomes)
            for hop in range(1, hops + 1)
        ],
        output_tokens=statistics.mean([o.output_tokens for o in outcomes]),
        sparse_steps=sum(sparse) / sum(o.output_tokens for o in outcomes) if sparse else None,
        late_steps=sum(o.late_steps for o in outcomes) / max(1, sum(sparse)),
        stale_steps=sum(o.stale_steps for o in outcomes) / max(1, sum(sparse)),
        **_costs(outcomes, run),
    )


def _costs(outcomes: Sequence[Outcome], run: Run) -> dict[str, float]:
    """What is known of the work and the memory of a cell, by field of Result."""
    cell = outcomes[0].cell
    config, system = find_config(cell.model), System.parse(cell.system)
    if config is None:
        return {}
    size, policy = ModelSize.of_config(config), policy_of(system, run.settings)
    tokens = sum(o.prompt_tokens + o.output_tokens / 2 for o in outcomes) / len(outcomes)
    attended = attended_tokens(system, run.settings)
    dense_layers = policy.get("dense_layers", 0)
    token = flops.decode_token(size, system.mode, tokens, attended, dense_layers)
    if system.mode != CACHE_RANK:
        return {"flops": token}
    sparse = msgspec.structs.replace(size, layers=size.layers - dense_layers)
    held = CacheRankConfig(
        ModelShape(1, size.query_heads, size.kv_heads, size.head_dim, run.dtype, 1.0),
        kv_residency=policy.get("kv_residency", "bf16"),
        kv_residency_options=residency_options(policy),
        score_keys=policy.get("score_keys", "resident"),
    )
    elements = 2 * size.kv_heads * size.head_dim
    bits = 8 * FORMATS[held.kv_residency].bytes_per_token(held) / elements
    return {"flops": token, "cache_rank_flops": flops.scoring(sparse, tokens), "bits": bits}


def write_report(run: Run, outcomes: Iterable[Outcome], out: Path) -> list[Path]:
    """Write all files into a folder; their paths. No plots if Matplotlib is not installed."""
    results = summarize(outcomes, run)
    files = report.write_report(out, "results", Report(run, results), markdown(run, results))
    return [*files, *write_plots(results, out)]


def markdown(run: Run, results: Sequence[Result]) -> str:
    """A table for each set of problems."""
    machine = [f"{name} {value}" for name, value in run.machine.items() if value]
    settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
    parts = [
        "# Accuracy",
        "\n".join(f"    {command}" for command in run.commands),
        f"{', '.join(machine)}. Sparse systems: {settings}. KV pool: {run.dtype}.",
        "Brackets are 95% intervals over problems (bootstrap, paired for differences). Of n "
        "right ones out of n, they say nothing: an error rate of 3/n is not excluded.",
    ]
    for (model, task), there in grouped(results, lambda r: r.cell.problems[:2]):
        if name := varying_dial(there):
            text = f"Exact chains and, in parentheses, hop accuracy, by {name}. Model "
            parts += [f"## {task} by {name}", f"{text}{Path(model).name}.", by_dial(there, name)]
    for (model, task, dials), there in grouped(results, lambda r: r.cell.problems):
        chains = sorted({result.chains for result in there})
        parts += [
            f"## {task}: {dials}",
            f"Model {Path(model).name}; {'–'.join(map(str, chains))} problems of "
            f"{there[0].hops} hops. Exposes: {TASKS[task].exposes}.",
            table(HEADER, map(_cells, there)),
        ]
    parts += [f"{label} failed: {reason}" for label, reason in run.failures.items()]
    return "\n\n".join(parts)


def varying_dial(results: Sequence[Result]) -> str | None:
    """The one dial in which problems differ, if there is one."""
    found = {(name, str(value)) for r in results for name, value in r.cell.dials.items()}
    times = Counter(name for name, _ in found)
    varying = [name for name, count in times.items() if count > 1]
    return varying[0] if len(varying) == 1 else None


def by_dial(results: Sequence[Result], name: str) -> str:
    """The accuracy of each system at each value of a dial."""
    columns = sorted({result.cell.dials[name] for result in results if name in result.cell.dials})
    shown: dict[str, dict[Any, str]] = {}
    for r in results:
        accuracy = f"{r.exact.value:.2f} ({r.hop_accuracy.value:.3f})"
        shown.setdefault(r.cell.system, {})[r.cell.dials.get(name)] = accuracy
    return table(
        ("system", *(f"{name} {column}" for column in columns)),
        (
            [label, *(cells.get(column, "–") for column in columns)]
            for label, cells in shown.items()
        ),
    )


def _cells(result: Result) -> list[str]:
    changes = dict(result.system.changes)
    budget = changes.pop("sparse_budget", None)
    return [
        result.system.name,
        ", ".join(f"{name} {value}" for name, value in changes.items()),
        number(budget, 0),
        interval(result.exact),
        interval(result.exact_difference),
        interval(result.hop_accuracy, 3),
        interval(result.correct_prefix, 1),
        number(result.output_tokens.value, 0),
        percent(result.sparse_steps),
        "–" if result.sparse_steps is None else percent(result.stale_steps),
        number(None if result.flops is None else result.flops / 1e6, 3),
        number(result.bits, 2),
    ]


def interval(estimate: Estimate | None, digits: int = 2) -> str:
    """A mean and its interval, which is left out where it is a point."""
    if estimate is None:
        return "–"
    value, low, high = (f"{part:.{digits}f}" for part in estimate)
    return value if low == high == value else f"{value} [{low}, {high}]"
