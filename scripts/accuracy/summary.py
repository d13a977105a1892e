"""Reduces outcomes to one line a cell: means with intervals, work and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.residency import FORMATS
from scripts.accuracy import flops, statistics
from scripts.accuracy.flops import ModelSize
from scripts.accuracy.outcomes import Cell, Outcome
from scripts.accuracy.settings import attended_tokens, policy_of
from scripts.accuracy.statistics import Estimate
from scripts.shared.models import find_config
from scripts.shared.systems import CACHE_RANK, DENSE, SYSTEMS, System, residency_options


class Run(msgspec.Struct):
    """How outcomes came about."""

    commands: list[str]  # commands that were run, the first and those which resumed it
    machine: dict[str, Any]  # what it ran on, and versions
    settings: dict[str, Any]  # arguments of sparse systems, see scripts.accuracy.settings
    dtype: str  # dtype of the KV pool
    servers: dict[str, dict[str, Any]] = {}  # what servers said, by label
    failures: dict[str, str] = {}  # failures of servers, by label


class Result(msgspec.Struct):
    """A cell in numbers; intervals are 95% over problems."""

    cell: Cell
    chains: int  # problems
    exact: Estimate  # fraction of problems whose every word is right
    exact_difference: Estimate | None  # difference to dense decoding of the same problems
    hop_accuracy: Estimate  # fraction of lookups that were right, a problem
    correct_prefix: Estimate  # hops before the first wrong word
    hops: int  # mean of a problem
    survival: list[float]  # fraction of chains that are right up to hop 1, 2, ..., `hops`
    output_tokens: Estimate  # mean of a problem
    sparse_steps: float | None  # fraction of decode steps; None without a cache rank
    late_steps: float  # fraction of the sparse ones
    stale_steps: float  # fraction of the sparse ones
    recall: float | None  # mean over problems, see docs/recall.md; None where none was measured
    attention_mass: float | None  # mean over problems
    flops: float | None  # work of the inference rank a token; None if it is unknown
    cache_rank_flops: float | None  # work of the cache rank's scores a token
    bits: float | None  # bits of an element on the cache rank, metadata included

    @property
    def system(self) -> System:
        """The parsed label."""
        return System.parse(self.cell.system)


def summarize(outcomes: Iterable[Outcome], run: Run) -> list[Result]:
    """One result a cell of two or more problems, in the order of SYSTEMS and then of budgets.

    A difference to dense decoding is over the problems that both decoded.
    """
    by_cell: dict[tuple[str, ...], dict[int, Outcome]] = {}
    for outcome in outcomes:
        by_cell.setdefault(outcome.cell.key, {})[outcome.seed] = outcome
    results = []
    for of_seed in by_cell.values():
        if len(of_seed) < 2:
            continue
        cell = next(iter(of_seed.values())).cell
        dense = by_cell.get((*cell.problems, DENSE), {})
        results.append(_result(cell, of_seed, dense, run))
    return sorted(results, key=_place)


def _place(result: Result) -> tuple[int, int]:
    system = result.system
    return list(SYSTEMS).index(system.name), system.changes.get("sparse_budget", 0)


def _result(cell: Cell, of_seed: dict[int, Outcome], dense: dict[int, Outcome], run: Run) -> Result:
    ordered = [of_seed[seed] for seed in sorted(of_seed)]
    shared = sorted(of_seed.keys() & dense.keys())
    paired = cell.system != DENSE and len(shared) > 1
    hops = max(outcome.hops for outcome in ordered)
    steps = sum(outcome.output_tokens for outcome in ordered)
    sparse = [o.sparse_steps for o in ordered if o.sparse_steps is not None]
    work = _work(cell, ordered, run)
    return Result(
        cell=cell,
        chains=len(ordered),
        exact=statistics.mean([o.exact for o in ordered]),
        exact_difference=statistics.difference(
            [float(of_seed[seed].exact) for seed in shared],
            [float(dense[seed].exact) for seed in shared],
        )
        if paired
        else None,
        hop_accuracy=statistics.mean([o.correct_hops / o.hops for o in ordered]),
        correct_prefix=statistics.mean([o.correct_prefix_hops for o in ordered]),
        hops=hops,
        survival=[
            sum(o.correct_prefix_hops >= hop for o in ordered) / len(ordered)
            for hop in range(1, hops + 1)
        ],
        output_tokens=statistics.mean([o.output_tokens for o in ordered]),
        sparse_steps=sum(sparse) / steps if sparse else None,
        late_steps=sum(o.late_steps for o in ordered) / max(1, sum(sparse)),
        stale_steps=sum(o.stale_steps for o in ordered) / max(1, sum(sparse)),
        recall=_mean_of_measured(o.recall for o in ordered),
        attention_mass=_mean_of_measured(o.attention_mass for o in ordered),
        flops=work[0],
        cache_rank_flops=work[1],
        bits=_bits(cell, run),
    )


def _mean_of_measured(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _work(cell: Cell, outcomes: Sequence[Outcome], run: Run) -> tuple[float | None, float | None]:
    """FLOPs a token of the inference rank, and of the cache rank's scores."""
    config = find_config(cell.model)
    if config is None:
        return None, None
    size = ModelSize.of_config(config)
    system = System.parse(cell.system)
    tokens = sum(o.prompt_tokens + o.output_tokens / 2 for o in outcomes) / len(outcomes)
    dense_layers = policy_of(system, run.settings).get("dense_layers", 0)
    attended = attended_tokens(system, run.settings)
    token = flops.decode_token(size, system.mode, tokens, attended, dense_layers)
    if system.mode != CACHE_RANK:
        return token, None
    sparse = msgspec.structs.replace(size, layers=size.layers - dense_layers)
    return token, flops.scoring(sparse, tokens)


def _bits(cell: Cell, run: Run) -> float | None:
    """Bits of an element on the cache rank, by the format's own count."""
    config, system = find_config(cell.model), System.parse(cell.system)
    if config is None or system.mode != CACHE_RANK:
        return None
    size = ModelSize.of_config(config)
    policy = policy_of(system, run.settings)
    held = CacheRankConfig(
        ModelShape(1, size.query_heads, size.kv_heads, size.head_dim, run.dtype, 1.0),
        kv_residency=policy.get("kv_residency", "bf16"),
        kv_residency_options=residency_options(policy),
        score_keys=policy.get("score_keys", "resident"),
    )
    elements = 2 * size.kv_heads * size.head_dim
    return 8 * FORMATS[held.kv_residency].bytes_per_token(held) / elements
