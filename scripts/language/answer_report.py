"""What `decode_text` found: tables with intervals over requests, and plots."""

from __future__ import annotations

import statistics as averages
from collections.abc import Sequence
from pathlib import Path

from scripts.language.answer_plots import write_plots
from scripts.language.answers import Agreement, Answer, AnswerReport, AnswerRun, agreements
from scripts.language.cells import by_system
from scripts.language.report import interval
from scripts.language.tasks import QUESTION
from scripts.shared import report
from scripts.shared.report import number, table
from scripts.shared.systems import DENSE

DENSE_ENOUGH = 0.5
"""Where dense decoding makes fewer of a task's problems than this, the others tell nothing."""

DEPTHS = 4
"""A document is divided into so many parts."""

QUESTIONS = """\
Greedy answers beside dense decoding's. All begin with the first {opening} tokens of dense
decoding's answer, forced while attention becomes sparse; no figure but the length counts them. A
request whose dense answer is no longer than that is left out.
*Same* are the tokens behind it before the first that differs. The ratio of lengths is of the
requests where the model ended both answers itself, and not the limit of {most} tokens. Repetition
is the share of 4-grams of tokens that stood in the same answer before (seq-rep-4, arXiv
1908.04319). Brackets are 95 % intervals over requests."""

CHECKED = """\
Exact answers and, in parentheses, the share of right words, by tokens of the prompt. Each answer
begins with words that are forced; none of them counts. At a length where dense decoding makes
fewer than half, a system tells nothing: those are in parentheses too."""

SPARSE = """\
The first sparse token of an answer, at the latest, and the tokens of its opening, at the least:
no token that counts was predicted by dense attention."""


def make_report(run: AnswerRun, answers: list[Answer]) -> AnswerReport:
    """What is written to `results.json`."""
    return AnswerReport(run, agreements(answers, QUESTION), answers)


def markdown(found: AnswerReport) -> str:
    """The report as text."""
    run, answers = found.run, found.answers
    parts = [
        *(f"    {command}" for command in run.commands),
        "",
        f"{run.model}: {run.problems} requests of each task and length, prompts of "
        f"{', '.join(map(str, run.lengths))} tokens. "
        f"Settings: {', '.join(f'{k}={v}' for k, v in run.settings.items())}. "
        f"Machine: {', '.join(f'{k} {v}' for k, v in run.machine.items())}.",
    ]
    if found.questions:
        explained = QUESTIONS.format(opening=run.opening, most=run.max_tokens)
        parts += ["", "## Questions", "", explained, "", _questions(found.questions)]
    for task in dict.fromkeys(a.task for a in answers if a.exact is not None):
        there = [answer for answer in answers if answer.task == task]
        parts += ["", f"## {task.capitalize()}", "", CHECKED, "", _by_length(there, run.lengths)]
        parts += ["", "Exact answers by depth in the document, of all lengths:", ""]
        parts += [_by_depth(there)]
    parts += ["", "## What was sparse", "", SPARSE, "", _sparse(answers)]
    if run.failures:
        parts += ["", "## Failures", ""]
        parts += [f"- {label}: {reason}" for label, reason in run.failures.items()]
    return "\n".join(parts)


def _questions(found: Sequence[Agreement]) -> str:
    header = (
        *("system", "k", "answers", "same, median", "no difference", "length", "dense's length"),
        *("ratio of lengths", "ended", "dense ended", "repetition", "dense's repetition"),
    )
    rows = []
    for agreement in found:
        count = len(agreement.same)
        median = agreement.median_same
        ratios = agreement.ratios
        rows.append(
            [
                agreement.system,
                number(agreement.budget, 0),
                str(count),
                "all" if median is None else f"{median:g}",
                number(agreement.same.count(None) / count),
                number(averages.mean(agreement.lengths), 0),
                number(averages.mean(agreement.dense_lengths), 0),
                f"{interval(ratios, 2)} of {len(ratios)}",
                str(sum(agreement.ended)),
                str(sum(agreement.dense_ended)),
                interval(agreement.repetition, 2),
                number(averages.mean(agreement.dense_repetition)),
            ]
        )
    return table(header, rows)


def exact_share(answers: Sequence[Answer]) -> float:
    """The share of answers whose words are all right."""
    return averages.mean(bool(answer.exact) for answer in answers)


def _by_length(answers: Sequence[Answer], lengths: Sequence[int]) -> str:
    dense = [answer for answer in answers if answer.system == DENSE]
    rows = []
    for (system, budget), there in by_system(answers).items():
        cells = []
        for length in lengths:
            found = [answer for answer in there if answer.length == length]
            text = _correct(found) if found else "–"
            reference = [answer for answer in dense if answer.length == length]
            tells = bool(reference) and exact_share(reference) >= DENSE_ENOUGH
            cells.append(text if tells else f"({text})")
        rows.append([system, number(budget, 0), *cells])
    return table(("system", "k", *(f"{length} tokens" for length in lengths)), rows)


def _correct(found: Sequence[Answer]) -> str:
    words = sum(a.right for a in found) / sum(a.words for a in found)
    return f"{sum(bool(a.exact) for a in found)} of {len(found)} ({words:.2f})"


def _by_depth(answers: Sequence[Answer]) -> str:
    rows = []
    for (system, budget), there in by_system(answers).items():
        parts: list[list[Answer]] = [[] for _ in range(DEPTHS)]
        for answer in there:
            parts[int((answer.depth or 0.0) * DEPTHS)].append(answer)
        shares = [number(exact_share(part) if part else None) for part in parts]
        rows.append([system, number(budget, 0), *shares])
    header = [f"{part / DEPTHS:.2f} to {(part + 1) / DEPTHS:.2f}" for part in range(DEPTHS)]
    return table(("system", "k", *header), rows)


def _sparse(answers: Sequence[Answer]) -> str:
    rows = []
    for (system, budget), there in by_system(answers).items():
        first = [a.sparse_from for a in there if a.sparse_from is not None]
        if not first:
            continue
        rows.append(
            [
                system,
                number(budget, 0),
                str(max(first)),
                str(min(a.opening for a in there)),
                str(sum(len(a.written) for a in there)),
                str(sum(a.late_steps for a in there)),
                str(sum(a.stale_steps for a in there)),
            ]
        )
    header = ("system", "k", "first sparse", "opening", "tokens that count")
    return table((*header, "late steps", "stale steps"), rows)


def write_report(found: AnswerReport, out: Path) -> list[Path]:
    """Write results.json, results.md and the plots; the files."""
    files = report.write_report(out, "results", found, markdown(found))
    return [*files, *write_plots(found, out)]
