"""Serves each system in turn, forces the same texts through it, and compares it with dense."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from transformers import AutoTokenizer

from scripts.language import forcing
from scripts.language.divergence import compare, kl_by_token
from scripts.language.forcing import Forced, force
from scripts.language.records import ReadText, Report, Score, TextRun
from scripts.language.report import write_report
from scripts.shared.comparison import (
    Load,
    attended_tokens,
    make_systems,
    serve_each,
    start_run,
)
from scripts.shared.models import folder_of
from scripts.shared.serving import Client, ServerError
from scripts.shared.systems import DENSE, System
from sglang_ext.calibration.texts import LONGEST_TOKEN

DIGITS = 6
"""The KL of a token is recorded with so many decimals."""

STATISTICS = ("late_steps", "stale_steps")
"""The statistics of a response, fields of Score, that a cache rank adds."""


class Tokens(NamedTuple):
    """A text as the model reads it: what is prefilled, and what is decoded."""

    name: str
    prompt: list[int]
    forced: list[int]


def tokenize(options: Namespace) -> list[Tokens]:
    """The first tokens of each text.

    Raises:
        ValueError: a text is too short, or cannot be read.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder_of(options.model))
    before = options.context - options.tokens - options.warm_up
    found = []
    for text in options.texts:
        start = text.read()[: LONGEST_TOKEN * options.context]  # a book takes a minute
        ids = tokenizer(start)["input_ids"][: options.context]
        if len(ids) < options.context:
            raise ValueError(
                f"{text.name}: has {len(ids)} tokens, and {options.context} are needed"
            )
        found.append(Tokens(text.name, ids[:before], ids[before:]))
    return found


class Scoring:
    """Compares distributions of systems with those of dense decoding.

    Attributes:
        scores: of all systems so far.
    """

    def __init__(self, options: Namespace, texts: Sequence[Tokens]) -> None:
        self.scores: list[Score] = []
        self._options, self._texts = options, texts
        self._dense: dict[str, Forced] = {}

    def decode(self, server: Client, system: System) -> None:
        """Decode all texts; dense decoding comes first, and the others are scored against it.

        Raises:
            ServerError: it did not decode them, or not by sparse attention.
        """
        folder = self._options.out / "logits" / system.label.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)

        def one(text: Tokens) -> Forced:
            return force(server, text.prompt, text.forced, folder / f"{text.name}.float32")

        with ThreadPoolExecutor(len(self._texts)) as pool:
            decoded = list(pool.map(one, self._texts))
        for text, forced in zip(self._texts, decoded, strict=True):
            if system.label == DENSE:
                self._dense[text.name] = forced
                continue
            self.scores.append(self._score(system, text.name, forced))
            forced.file.unlink()

    def _score(self, system: System, name: str, forced: Forced) -> Score:
        tokens = len(forced.tokens)
        first = tokens - self._options.tokens  # that counts
        # The first token comes from the prefill, which is dense in every system.
        sparse_from = forced.first_sparse if system.has_cache_rank else 1
        if not system.is_sparse:
            sparse_from = first
        if sparse_from > first:
            reason = forced.statistics["dense_reason"] or "waits for its selection"
            raise ServerError(
                f"{name}: attention was dense for {sparse_from} tokens ({reason}): --warm-up "
                f"{first} is too short"
            )
        dense, found = (run.log_probabilities(sparse_from) for run in (self._dense[name], forced))
        counted = slice(first - sparse_from, None)
        divergence = compare(dense[counted], found[counted], forced.tokens[first:])
        label, budget = system.without_budget()
        attended = self._options.context
        statistics = forced.statistics
        if system.is_sparse:
            said = statistics.get("attended_tokens")  # baselines say nothing
            attended = said or min(attended, attended_tokens(system, self._options.settings))
        return Score(
            text=name,
            system=label,
            budget=budget,
            attended=attended,
            tokens=self._options.tokens,
            **msgspec.structs.asdict(divergence),
            sparse_from=sparse_from if system.is_sparse else None,
            kl_after_transition=kl_by_token(dense, found).round(DIGITS).tolist(),
            **{key: statistics[key] for key in STATISTICS if key in statistics},
        )


def score(options: Namespace, argv: Sequence[str]) -> tuple[Report, list[Path]]:
    """Score all systems; the report, and its files, which an interrupted run has as well.

    Raises:
        ServerError: dense decoding failed.
        ValueError: a text cannot be read, or is too short.
    """
    texts = tokenize(options)
    run = TextRun(
        **start_run("score_text", argv, options),
        context=options.context,
        scored=options.tokens,
        warm_up=options.warm_up,
        texts={
            text.name: ReadText(text.kind, text.sha256, options.context) for text in options.texts
        },
    )
    options.server_flags = [*forcing.SERVER_FLAGS, *options.server_flags]
    load = Load(len(texts), len(texts) * options.context, len(texts[0].prompt))
    scoring = Scoring(options, texts)
    report = Report(run, scoring.scores)
    try:
        serve_each([System.parse(DENSE)], options, load, run, scoring.decode)
        if DENSE in run.failures:
            raise ServerError(f"dense decoding failed: {run.failures[DENSE]}")
        others = [system for system in make_systems(options) if system.label != DENSE]
        serve_each(others, options, load, run, scoring.decode)
    finally:
        shutil.rmtree(options.out / "logits", ignore_errors=True)
        files = write_report(report, options.out)
    return report, files
