"""Serves each system in turn, lets it answer the same requests, and keeps its answers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from scripts.language.answer_report import make_report, write_report
from scripts.language.answers import Answer, AnswerReport, AnswerRun, Key
from scripts.language.cells import without_budget
from scripts.language.comparison import Comparison, Load, make_systems
from scripts.language.forcing import Written, write
from scripts.language.prompts import Reader
from scripts.language.runs import common_fields, find_run, go_on, recorded
from scripts.language.tasks import QUESTION, TASKS, Request, make_question, plain
from scripts.shared.lines import Lines
from scripts.shared.serving import Client, ServerError
from scripts.shared.systems import DENSE, System
from sglang_ext.calibration.texts import TEXTS

STATISTICS = ("recall", "attention_mass", "late_steps", "stale_steps")
"""The statistics of a response, fields of Answer, that a cache rank adds."""


class Named(NamedTuple):
    """A request, and what it is called."""

    key: Key
    request: Request


def make_requests(options: Namespace, reader: Reader) -> list[Named]:
    """All requests, the longest first, so that the last to end is a short one.

    Raises:
        ValueError: a length is out of the range of a task.
    """
    requests = []
    for length in sorted(options.lengths, reverse=True):
        for task in options.tasks:
            for seed in range(options.problems):
                if task == QUESTION:
                    made = make_question(reader, seed, length, options.max_tokens)
                else:
                    made = TASKS[task](reader, seed, length)
                requests.append(Named((task, length, seed), made))
    return requests


def load_of(requests: Sequence[Named], at_once: int) -> Load:
    """What a server has to hold that answers so many requests at once."""
    lengths = [len(r.prompt) + len(r.opening) + r.max_tokens for _, r in requests]
    at_once = min(at_once, len(requests))
    return Load(at_once, at_once * max(lengths), min(len(r.prompt) for _, r in requests))


class Decoding:
    """Lets servers answer, and appends the answers to a file as they come."""

    def __init__(
        self, options: Namespace, reader: Reader, lines: Lines[Answer], run: AnswerRun
    ) -> None:
        self._options, self._reader, self._lines, self._run = options, reader, lines, run
        self._dense: dict[Key, Answer] = {}
        self._done: set[tuple[str, Key]] = set()

    def run_all(self, systems: Sequence[System], requests: Sequence[Named]) -> None:
        """Decode what is missing; a failing server is noted and the others go on.

        Raises:
            ServerError: dense decoding failed, which all is compared with.
        """
        answers = self._lines.read()
        self._dense = {a.request: a for a in answers if a.label == DENSE}
        self._done = {(a.label, a.request) for a in answers}
        dense = self._missing(System.parse(DENSE), requests)
        others = [(system, self._missing(system, requests)) for system in systems]
        wanted = len(dense) + sum(len(work) for _, work in others)
        with tqdm(total=wanted, unit="answer", dynamic_ncols=True) as bar:

            def answer_all(server: Client, system: System, work: Sequence[Named]) -> None:
                self._answer_all(server, system, work, bar)

            load = load_of(requests, self._options.concurrency)
            Comparison(self._options, load, self._run, answer_all).run_all(dense, others, bar)

    def _missing(self, system: System, requests: Sequence[Named]) -> list[Named]:
        return [
            named
            for named in requests
            if (system.label, named.key) not in self._done
            and not self._is_left_out(system, named.key)
        ]

    def _answer_all(
        self, server: Client, system: System, work: Sequence[Named], bar: tqdm[Any]
    ) -> None:
        with ThreadPoolExecutor(self._options.concurrency) as pool:
            calls = [pool.submit(self._answer, server, system, named) for named in work]
            try:
                for call in as_completed(calls):
                    if answer := call.result():
                        self._lines.append(answer)
                        if system.label == DENSE:
                            self._dense[answer.request] = answer
                    bar.update()
            finally:
                pool.shutdown(cancel_futures=True)

    def _answer(self, server: Client, system: System, named: Named) -> Answer | None:
        """One answer; None to a question to which dense decoding's is no longer than the opening.

        Raises:
            ServerError: attention was still dense when the opening ended.
        """
        if self._is_left_out(system, named.key):
            return None
        (task, length, seed), request = named
        opening, most = request.opening, request.max_tokens
        if task == QUESTION and system.label != DENSE:
            opening = self._dense[named.key].tokens[: self._options.opening]
            most -= len(opening)
        written = write(server, request.prompt, opening, most)
        label, budget = without_budget(system)
        text = self._reader.text(written.tokens[len(opening) :])
        graded: dict[str, Any] = {}
        if request.problem is not None:
            grade = request.problem.grade(plain(text))
            graded = {
                "exact": grade.exact,
                "right": grade.correct_hops,
                "prefix": grade.correct_prefix_hops,
                "words": grade.hops,
            }
        return Answer(
            task=task,
            length=length,
            seed=seed,
            depth=request.depth,
            system=label,
            budget=budget,
            opening=len(opening),
            tokens=written.tokens,
            ended=written.ended,
            text=text,
            sparse_from=first_sparse(system, written, len(opening), named.key),
            **graded,
            **{key: written.statistics[key] for key in STATISTICS if key in written.statistics},
        )

    def _is_left_out(self, system: System, key: Key) -> bool:
        """Whether nothing of dense decoding's answer to a question is left to compare with."""
        dense = self._dense.get(key)
        if system.label == DENSE or key[0] != QUESTION or dense is None:
            return False
        return len(dense.tokens) <= self._options.opening


def first_sparse(system: System, written: Written, opening: int, key: Key) -> int | None:
    """The tokens of an answer before the first that sparse attention predicted.

    Raises:
        ServerError: the first token behind the opening is not sparse.
    """
    if not system.is_sparse:
        return None
    if not system.has_cache_rank:
        return 1  # the first token comes from the prefill, which is dense in every system
    # An end of the model's own is a token that was predicted, too.
    sparse_from = len(written.tokens) + written.ended - int(written.statistics["sparse_steps"])
    if sparse_from > opening:
        reason = written.statistics["dense_reason"] or "waits for its selection"
        raise ServerError(
            f"{key}: attention was dense for {sparse_from} tokens ({reason}), and the opening has "
            f"{opening}: pass a larger --opening or a smaller query_window"
        )
    return sparse_from


def decode(options: Namespace, argv: Sequence[str]) -> tuple[AnswerReport, list[Path]]:
    """Decode what OUT lacks, unless told to render only; the report, and its files.

    Raises:
        ServerError: dense decoding failed.
        ValueError: OUT does not suit the options, or a label or a length is wrong.
    """
    lines = Lines(options.out / "answers.jsonl", Answer)
    earlier = find_run(options.out, AnswerRun)
    if options.render:
        if earlier is None:
            raise ValueError(f"{options.out} has no results: nothing to render")
        report = make_report(earlier, lines.read())
        return report, write_report(report, options.out)
    systems, reader = make_systems(options), Reader(options.model)
    requests = make_requests(options, reader)
    run = AnswerRun(
        **common_fields("decode_text", argv, options),
        lengths=sorted(options.lengths),
        problems=options.problems,
        opening=options.opening,
        max_tokens=options.max_tokens,
        texts={name: text.sha256 for name, text in TEXTS.items()},
    )
    go_on(run, earlier, options)
    lines.drop_half_line()
    with recorded(run, options.out):
        Decoding(options, reader, lines, run).run_all(systems, requests)
    report = make_report(run, lines.read())
    return report, write_report(report, options.out)
