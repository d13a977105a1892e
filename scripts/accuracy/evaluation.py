"""Asks systems to walk chains, and counts what they got right."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from scripts.accuracy.pointer_chase import Problem, make_chain
from scripts.shared import report, statistics
from scripts.shared.comparison import (
    Load,
    Run,
    describe_failures,
    describe_run,
    make_systems,
    serve_each,
    start_run,
)
from scripts.shared.report import percent, table
from scripts.shared.serving import Client
from scripts.shared.statistics import Estimate, interval
from scripts.shared.systems import DENSE, SYSTEMS, System

REQUEST_SECONDS = 3600.0

STATISTICS = ("sparse_steps", "stale_steps")
"""The statistics of a response, fields of Outcome, that a cache rank adds."""


class Outcome(msgspec.Struct, frozen=True):
    """A chain, decoded and graded."""

    correct_hops: float  # share of all
    exact: bool  # every word is right
    tokens: int
    sparse_steps: int | None = None  # None without a cache rank
    stale_steps: int = 0  # steps that missed their selection


class Result(msgspec.Struct):
    """A system in numbers; intervals are 95% over chains."""

    system: str  # label, with the budget
    exact: Estimate  # share of chains whose every word is right
    exact_difference: Estimate | None  # from dense decoding of the same chains
    correct_hops: Estimate  # share of lookups that were right
    sparse_steps: float | None  # share of decode steps; None without a cache rank
    stale_steps: float  # share of the sparse ones


class Report(msgspec.Struct):
    """The content of `results.json`."""

    run: Run
    chains: int
    facts: int
    hops: int
    results: list[Result]


def evaluate(options: Namespace, argv: Sequence[str]) -> tuple[Report, list[Path]]:
    """Ask all systems all chains; the report, and its files.

    Raises:
        ValueError: there are no such chains.
    """
    chains = [make_chain(seed, options.facts, options.hops) for seed in range(options.chains)]
    run = Run(**start_run("evaluate", argv, options))
    outcomes: dict[str, list[Outcome]] = {}

    def ask(server: Client, system: System) -> None:
        decode = functools.partial(_decode, server, system)
        with ThreadPoolExecutor(options.concurrency) as pool:
            outcomes[system.label] = list(pool.map(decode, chains))

    systems = make_systems(options)
    if options.base_url:
        for system in systems:
            ask(Client(options.base_url), system)
    else:
        serve_each(systems, options, _load_of(chains, options.concurrency), run, ask)
    dense = outcomes.get(DENSE)
    results = [_summarize(label, outcomes[label], dense) for label in sorted(outcomes, key=_place)]
    found = Report(run, len(chains), options.facts, options.hops, results)
    return found, report.write_report(options.out, "results", found, markdown(found))


def _load_of(chains: Sequence[Problem], concurrency: int) -> Load:
    """What a server has to hold; the tokenizer adds <bos>."""
    prompt = len(chains[0].prompt.split()) + 1
    requests = min(concurrency, len(chains))
    return Load(requests, requests * (prompt + chains[0].max_tokens), prompt)


def _decode(server: Client, system: System, chain: Problem) -> Outcome:
    sampling: dict[str, Any] = {"max_new_tokens": chain.max_tokens, "temperature": 0}
    if system.label == DENSE:  # also on a server which has a cache rank
        sampling["custom_params"] = {"cache_rank": False}
    body = {"text": chain.prompt, "sampling_params": sampling}
    response = server.post("/generate", body, timeout=REQUEST_SECONDS)
    response.raise_for_status()
    decoded = response.json()
    grade, meta = chain.grade(decoded["text"]), decoded["meta_info"]
    found = meta.get("cache_rank") or {}
    return Outcome(
        grade.correct_hops / grade.hops,
        grade.exact,
        meta["completion_tokens"],
        **{name: found[name] for name in STATISTICS if name in found},
    )


def _place(label: str) -> tuple[int, int]:
    """Where a system stands in the table."""
    system = System.parse(label)
    return list(SYSTEMS).index(system.name), system.changes.get("sparse_budget") or 0


def _summarize(label: str, outcomes: Sequence[Outcome], dense: Sequence[Outcome] | None) -> Result:
    exact, sparse = [o.exact for o in outcomes], [o.sparse_steps for o in outcomes]
    difference = None
    if dense is not None and label != DENSE:
        difference = statistics.difference(exact, [o.exact for o in dense])
    steps = [count for count in sparse if count is not None]
    return Result(
        system=label,
        exact=statistics.mean(exact),
        exact_difference=difference,
        correct_hops=statistics.mean([o.correct_hops for o in outcomes]),
        sparse_steps=sum(steps) / sum(o.tokens for o in outcomes) if steps else None,
        stale_steps=sum(o.stale_steps for o in outcomes) / max(1, sum(steps)),
    )


def markdown(found: Report) -> str:
    """The report as text."""
    header = ("system", "exact chains", "minus dense", "correct hops", "sparse steps", "stale")
    parts = [
        f"# {found.chains} chains of {found.hops} hops through {found.facts} facts",
        describe_run(found.run),
        "Brackets are 95% intervals over chains (bootstrap, paired for differences). Of n right "
        "ones out of n, they say nothing: an error rate of 3/n is not excluded.",
        table(header, map(_cells, found.results)),
        *describe_failures(found.run),
    ]
    return "\n\n".join(parts)


def _cells(result: Result) -> list[str]:
    return [
        result.system,
        interval(result.exact),
        interval(result.exact_difference),
        interval(result.correct_hops, 3),
        percent(result.sparse_steps),
        "–" if result.sparse_steps is None else percent(result.stale_steps),
    ]
