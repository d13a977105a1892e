"""Measure the accuracy of several ways to decode, on chains whose every step is checked.

    python -m scripts.evaluate --out results/budgets
    python -m scripts.evaluate --systems dense quest cache-rank --budgets 16 64 --out ...
    python -m scripts.evaluate --systems dense cache-rank:kv_residency=hack --out ...
    python -m scripts.evaluate --base-url URL --systems dense cache-rank --budgets 64 --out ...

Serves the bundled model in each system in turn and sends it all chains at once: walks through a
table of facts, of which each hop needs exactly one token (scripts/accuracy/pointer_chase.py).
Chains have seeds 0, 1, ..., the same for every system. Writes results.json and results.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from scripts.accuracy.pointer_chase import Grade, Problem, make_chain
from scripts.shared import comparison, statistics
from scripts.shared.command import UsageError, make_parser, run
from scripts.shared.comparison import Load, Run
from scripts.shared.models import BUNDLED
from scripts.shared.report import percent, table_of, write_report
from scripts.shared.serving import Client
from scripts.shared.statistics import Estimate, interval
from scripts.shared.systems import CACHE_RANK, DECODE_MODES, DENSE, INLINE, System

FACTS, AT_ONCE = 128, 64
REQUEST_SECONDS = 3600.0

SETTINGS: dict[str, Any] = {
    "sink_tokens": 4,
    "recent_tokens": 16,
    "hysteresis": 8,
    "kv_residency": "bf16",
}
"""The bundled model attends to few tokens. Keys are as they came: what a format loses is asked for
by its name."""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; UsageError if it is wrong."""
    parser = make_parser("evaluate", __doc__)
    comparison.add_options(
        parser, BUNDLED, (DENSE, *DECODE_MODES, INLINE, CACHE_RANK), (16, 32, 64), SETTINGS
    )
    add = parser.add_argument
    add("--hops", type=int, default=80, help="of a chain; default: %(default)s")
    add("--chains", type=int, default=64, help="default: %(default)s")
    add("--base-url", help="a server that runs already: dense decoding, and one system's name")
    options = comparison.read_options(parser, argv, SETTINGS)
    if options.chains < 2 or options.hops < 1:
        raise UsageError("--chains must be at least 2 for an interval, and --hops at least 1")
    if options.base_url and len(set(options.systems) - {DENSE}) * len(options.budgets) > 1:
        raise UsageError(
            "--base-url serves one system: name one beside dense, with one of --budgets"
        )
    return options


class Outcome(NamedTuple):
    """All chains, decoded by a system."""

    grades: list[Grade]
    metas: list[dict[str, Any]]  # what the server says of each


class Result(msgspec.Struct):
    """A system in numbers; intervals are 95% over chains."""

    system: str  # label, with the budget
    exact: Estimate  # share of chains whose every word is right
    exact_difference: Estimate | None  # from dense decoding of the same chains
    correct_hops: Estimate  # share of lookups that were right
    sparse_steps: float | None  # share of decode steps; None without a cache rank
    stale_steps: float | None  # share of the sparse ones


class Report(msgspec.Struct):
    """The content of `results.json`."""

    run: Run
    chains: int
    hops: int
    results: list[Result]


def evaluate(options: argparse.Namespace, argv: Sequence[str]) -> Report:
    """Ask all systems all chains."""
    chains = [make_chain(seed, FACTS, options.hops) for seed in range(options.chains)]
    run = Run.of("evaluate", argv, options)
    outcomes: dict[str, Outcome] = {}

    def ask(server: Client, system: System) -> None:
        outcomes[system.label] = _decode(server, system, chains)

    systems = comparison.make_systems(options)
    if options.base_url:
        for system in systems:
            ask(Client(options.base_url), system)
    else:
        prompt = len(chains[0].prompt.split()) + 1  # the tokenizer adds <bos>
        requests = min(AT_ONCE, len(chains))
        load = Load(requests, requests * (prompt + chains[0].max_tokens), prompt)
        comparison.serve_each(systems, options, load, run, ask)
    labels = [system.label for system in systems if system.label in outcomes]
    labels.sort(key=comparison.place_of)
    results = [_summarize(label, outcomes, options.hops) for label in labels]
    return Report(run, len(chains), options.hops, results)


def _decode(server: Client, system: System, chains: Sequence[Problem]) -> Outcome:
    sampling: dict[str, Any] = {"max_new_tokens": chains[0].max_tokens, "temperature": 0}
    if system.label == DENSE:  # also on a server which has a cache rank
        sampling["custom_params"] = {"cache_rank": False}
    body = {"text": [chain.prompt for chain in chains], "sampling_params": sampling}
    response = server.post("/generate", body, timeout=REQUEST_SECONDS)
    response.raise_for_status()
    found = response.json()
    grades = [chain.grade(one["text"]) for chain, one in zip(chains, found, strict=True)]
    return Outcome(grades, [one["meta_info"] for one in found])


def _summarize(label: str, outcomes: Mapping[str, Outcome], hops: int) -> Result:
    grades, metas = outcomes[label]
    exact, difference = [grade.exact for grade in grades], None
    if label != DENSE and DENSE in outcomes:
        dense = [grade.exact for grade in outcomes[DENSE].grades]
        difference = statistics.mean(np.subtract(exact, dense, dtype=float))
    counts = [meta["cache_rank"] for meta in metas if meta.get("cache_rank")]
    sparse, stale = (sum(c[name] for c in counts) for name in ("sparse_steps", "stale_steps"))
    return Result(
        system=label,
        exact=statistics.mean(exact),
        exact_difference=difference,
        correct_hops=statistics.mean([grade.correct_hops / hops for grade in grades]),
        sparse_steps=sparse / sum(meta["completion_tokens"] for meta in metas) if counts else None,
        stale_steps=stale / max(1, sparse) if counts else None,
    )


def markdown(found: Report) -> str:
    parts = [
        f"# {found.chains} chains of {found.hops} hops through {FACTS} facts",
        found.run.head(),
        "Brackets are 95% intervals over chains (bootstrap, paired for differences). Of n right "
        "ones out of n, they say nothing: an error rate of 3/n is not excluded.",
        table_of(
            {
                "system": result.system,
                "exact chains": interval(result.exact),
                "minus dense": interval(result.exact_difference),
                "correct hops": interval(result.correct_hops, 3),
                "sparse steps": percent(result.sparse_steps),
                "stale": percent(result.stale_steps),
            }
            for result in found.results
        ),
        *found.run.foot(),
    ]
    return "\n\n".join(parts)


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    found = evaluate(options, argv)
    print(*write_report(options.out, "results", found, markdown(found)), sep="\n")
    return int(bool(found.run.failures))


if __name__ == "__main__":
    run(main)
