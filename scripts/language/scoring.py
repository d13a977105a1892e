"""Serves each system in turn, forces the same texts through it, and compares it with dense."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import AutoTokenizer

from scripts.accuracy.settings import attended_tokens
from scripts.language.cells import without_budget
from scripts.language.comparison import Comparison, Load, make_systems
from scripts.language.divergence import compare, kl_by_token
from scripts.language.forcing import Forced, force
from scripts.language.records import LayerRecall, ReadText, Report, Score, TextRun
from scripts.language.report import write_report
from scripts.language.runs import common_fields, find_run, go_on, recorded
from scripts.shared.lines import Lines
from scripts.shared.models import folder_of
from scripts.shared.serving import Client, ServerError
from scripts.shared.systems import DENSE, System
from sglang_ext.calibration.texts import LONGEST_TOKEN

DIGITS = 6
"""The KL of a token is recorded with so many decimals."""

STATISTICS = (
    *("recall", "attention_mass", "held_recall", "held_attention_mass"),
    *("late_steps", "stale_steps"),
)
"""The statistics of a response, fields of Score, that a cache rank adds."""


class Tokens(NamedTuple):
    """A text as the model reads it: what is prefilled, and what is decoded."""

    name: str
    prompt: list[int]
    forced: list[int]


def tokenize(options: Namespace) -> tuple[list[Tokens], dict[str, ReadText]]:
    """The first tokens of each text.

    Raises:
        ValueError: a text is too short.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder_of(options.model))
    tokens, read = [], {}
    for text in options.texts:
        start = text.read()[: LONGEST_TOKEN * options.context]  # a book takes a minute
        ids = tokenizer(start)["input_ids"]
        if len(ids) < options.context:
            raise ValueError(
                f"{text.name}: has {len(ids)} tokens, and --context {options.context} needs more"
            )
        before = options.context - options.tokens - options.warm_up
        tokens.append(Tokens(text.name, ids[:before], ids[before : options.context]))
        read[text.name] = ReadText(text.kind, text.sha256, options.context)
    return tokens, read


def load_of(options: Namespace) -> Load:
    """What a server has to hold that decodes all texts at once."""
    requests = len(options.texts)
    prompt = options.context - options.tokens - options.warm_up
    return Load(requests, requests * options.context, prompt)


class Scoring:
    """Compares distributions of systems with those of dense decoding, and records it."""

    def __init__(self, options: Namespace, lines: Lines[Score], run: TextRun) -> None:
        self._options, self._lines, self._run = options, lines, run
        self._folder = options.out / "logits"
        self._dense: dict[str, Forced] = {}

    def run_all(self, systems: Sequence[System], texts: list[Tokens]) -> None:
        """Score what is missing; a failing server is noted and the others go on.

        Raises:
            ServerError: dense decoding failed, which all is compared with.
        """
        done = {score.key for score in self._lines.read()}
        missing = {
            system.label: [text for text in texts if (system.label, text.name) not in done]
            for system in systems
        }
        others = [(system, work) for system in systems if (work := missing[system.label])]
        if not others:
            return
        with tqdm(total=1 + len(others), unit="server", dynamic_ncols=True) as bar:

            def run_one(server: Client, system: System, work: Sequence[Tokens]) -> None:
                self._run_one(server, system, work)
                bar.update()

            comparison = Comparison(self._options, load_of(self._options), self._run, run_one)
            try:
                comparison.run_all(texts, others, bar)
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _run_one(self, server: Client, system: System, work: Sequence[Tokens]) -> None:
        decoded = dict(self._decode(server, system, work))
        self._run.layers[system.label] = layer_recall(server)
        if system.label == DENSE:
            self._dense = decoded
            return
        for name, forced in decoded.items():
            self._lines.append(self._score(system, name, forced))
            forced.file.unlink()

    def _decode(
        self, server: Client, system: System, work: Sequence[Tokens]
    ) -> Iterator[tuple[str, Forced]]:
        folder = self._folder / system.label.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)

        def one(index: int) -> Forced:
            text = work[index]
            return force(server, text.prompt, text.forced, folder / f"{index}.float32")

        with ThreadPoolExecutor(len(work)) as pool:
            decoded = pool.map(one, range(len(work)))
            yield from zip((text.name for text in work), decoded, strict=True)

    def _score(self, system: System, name: str, forced: Forced) -> Score:
        """Compare a text that was decoded with its dense decoding.

        Raises:
            ServerError: it was not sparse from the first token on that counts.
        """
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
        label, budget = without_budget(system)
        statistics = forced.statistics
        return Score(
            name,
            label,
            budget,
            min(attended_tokens(system, self._options.settings), self._options.context)
            if system.is_sparse
            else self._options.context,
            self._options.tokens,
            **divergence._asdict(),
            sparse_from=sparse_from if system.is_sparse else None,
            kl_after_transition=kl_by_token(dense, found).round(DIGITS).tolist(),
            **{key: statistics[key] for key in STATISTICS if key in statistics},
        )


def layer_recall(server: Client) -> dict[int, LayerRecall]:
    """What a server measured by true keys, by layer; empty where it measured nothing."""
    measured = server.cache_rank().get("recall_by_head") or {}
    if "recall" not in measured:
        return {}
    means = (np.mean(measured[name], axis=-1) for name in LayerRecall.__struct_fields__)
    return {
        layer: LayerRecall(*map(float, values))
        for layer, *values in zip(measured["layers"], *means, strict=True)
    }


def score(options: Namespace, argv: Sequence[str]) -> tuple[Report, list[Path]]:
    """Score what OUT lacks, unless told to render only; the report, and its files.

    Raises:
        ServerError: dense decoding failed.
        ValueError: OUT does not suit the options, or a label or a text is wrong.
    """
    lines = Lines(options.out / "scores.jsonl", Score)
    earlier = find_run(options.out, TextRun)
    if options.render:
        if earlier is None:
            raise ValueError(f"{options.out} has no results: nothing to render")
        report = Report(earlier, lines.read())
        return report, write_report(report, options.out)
    systems = make_systems(options)
    tokens, texts = tokenize(options)
    run = TextRun(
        **common_fields("score_text", argv, options),
        context=options.context,
        scored=options.tokens,
        warm_up=options.warm_up,
        texts=texts,
    )
    go_on(run, earlier, options)
    lines.drop_half_line()
    with recorded(run, options.out):
        Scoring(options, lines, run).run_all(systems, tokens)
    report = Report(run, lines.read())
    return report, write_report(report, options.out)
