"""Two runs of the same questions, compared question by question.

Thirty questions of AIME are a small sample: what the mean would be on other thirty is uncertain by
seven to nine points, however often each is asked. Most of that is how hard the questions are, which
two systems share. So every figure of a difference here is a mean of differences within questions,
and its interval is over questions; it holds the noise of a few answers to each as well.

Accuracy alone does not say what sparse attention costs: it can also make chains of thought longer
(Less is Less, arXiv 2601.03043; Hold Onto That Thought, arXiv 2512.12008), and so lose in tokens
what it gains in time per token. Lengths and truncated answers stand beside.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from scripts.accuracy.runs import Run, read_run
from scripts.shared import statistics
from scripts.shared.command import UsageError
from scripts.shared.report import percent, table_of
from scripts.shared.statistics import Estimate, interval

_SAME = ("reasoning_parser", "sampling_defaults", "chat_template")
"""Flags of servers that must not differ, beside how the harness sampled and the questions."""


class Summary(msgspec.Struct):
    """One system on one benchmark."""

    accuracy: Estimate  # share of right answers, the mean over questions
    tokens: Estimate  # mean length of an answer, its thinking included
    truncated: float  # share of answers that reached the most tokens
    unanswered: float  # share in which nothing could be read as an answer
    failed: float  # share of requests that failed; they are left out of all else


class Comparison(msgspec.Struct):
    """Two systems on one benchmark."""

    benchmark: str
    questions: int
    repeats: int
    baseline: Summary
    system: Summary
    accuracy_difference: Estimate  # system less baseline, in [-1, 1]
    tokens_ratio: Estimate  # the system's mean over the baseline's
    gained: int  # questions with more right answers than the baseline's
    lost: int  # questions with fewer


class Report(msgspec.Struct):
    """Everything that is said of two folders of runs; `comparison.json`."""

    names: tuple[str, str]  # of the baseline and the system
    comparisons: list[Comparison]
    warnings: list[str]  # of all runs


def compare_folders(baseline: Path, system: Path) -> Report:
    """Compare all benchmarks that two folders hold, which `run --out` named after the systems.

    UsageError if two runs are not of the same questions, sampled and read in the same way, or one
    was cut short.
    """
    report = Report((baseline.resolve().name, system.resolve().name), [], [])
    held = {file.parent.name for side in (baseline, system) for file in side.glob("*/run.json")}
    for name in sorted(held):
        pair = read_run(baseline / name), read_run(system / name)
        ours, theirs = map(_settings, pair)
        different = [of for of in ours if ours[of] != theirs[of]]
        if different:
            said = "; ".join(f"{of} is {ours[of]!r} and {theirs[of]!r}" for of in different)
            raise UsageError(f"{baseline / name} and {system / name} cannot be compared: {said}")
        report.comparisons.append(_compare(*pair))
        for side, run in zip(report.names, pair, strict=True):
            report.warnings += [f"{side}, {name}: {warning}" for warning in run.record.warnings]
    if not held:
        raise FileNotFoundError(f"{baseline} and {system} hold no runs")
    return report


def _settings(run: Run) -> dict[str, Any]:
    """What two runs must share."""
    gen = dict(run.metrics["gen"])
    body = gen.pop("extra_body", None) or {}
    asked = {(answer.question, answer.problem, answer.expected) for answer in run.answers}
    return {
        # The folder that holds a model may differ between machines, its name should not.
        "model": Path(str(run.record.server.get("model_path"))).name,
        **{name: run.record.server.get(name) for name in _SAME},
        **gen,
        "top_k": body.get("top_k"),
        "prompt": run.metrics.get("prompt", {}).get("yaml"),
        "repeats": run.metrics["n_repeats"],
        "harness": f"sgl-eval {run.metrics['sgl_eval_version']}",
        "number of questions": len(asked),
        "questions": hashlib.sha256(repr(sorted(asked)).encode()).hexdigest(),
    }


def _compare(baseline: Run, system: Run) -> Comparison:
    gains = _means(system, "is_right") - _means(baseline, "is_right")
    return Comparison(
        benchmark=baseline.record.benchmark,
        questions=len(gains),
        repeats=baseline.metrics["n_repeats"],
        baseline=_summarize(baseline),
        system=_summarize(system),
        accuracy_difference=statistics.mean(gains),
        tokens_ratio=statistics.ratio(_means(system, "tokens"), _means(baseline, "tokens")),
        gained=int((gains > 0).sum()),
        lost=int((gains < 0).sum()),
    )


def _means(run: Run, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What an answer to each question has in the mean, [questions in their order]."""
    found: dict[str, list[float]] = {answer.question: [] for answer in run.answers}
    for answer in run.answers:
        if not answer.has_failed:
            found[answer.question].append(getattr(answer, name))
    if not all(found.values()):
        raise UsageError("every request of a question failed; run it again")
    return np.array([fmean(found[question]) for question in sorted(found)])


def _summarize(run: Run) -> Summary:
    answered = [answer for answer in run.answers if not answer.has_failed]
    return Summary(
        accuracy=statistics.mean(_means(run, "is_right")),
        tokens=statistics.mean(_means(run, "tokens")),
        truncated=fmean(answer.is_truncated for answer in answered),
        unanswered=fmean(answer.is_unanswered for answer in answered),
        failed=1 - len(answered) / len(run.answers),
    )


def markdown(found: Report) -> str:
    baseline, system = found.names
    parts = [
        f"# {system} against {baseline}",
        "Accuracy is the share of right answers in percent, the mean over questions. Differences "
        "are of the same questions; [low, high] is a 95% interval from resampling questions. One "
        "that holds 0 does not show that the two are equal: it shows which differences are "
        "excluded.",
        table_of(
            {
                "benchmark": each.benchmark,
                "questions × answers": f"{each.questions} × {each.repeats}",
                baseline: interval(each.baseline.accuracy, 1, 100),
                system: interval(each.system.accuracy, 1, 100),
                "difference, points": interval(each.accuracy_difference, 1, 100, sign=True),
                "questions better / worse": f"{each.gained} / {each.lost}",
            }
            for each in found.comparisons
        ),
        table_of(
            {
                "benchmark": each.benchmark,
                "": name,
                "tokens": f"{side.tokens.value:.0f}",
                "ratio": interval(each.tokens_ratio, 3) if side is each.system else "",
                "cut": percent(side.truncated),
                "none": percent(side.unanswered),
                "failed": percent(side.failed),
            }
            for each in found.comparisons
            for name, side in zip(found.names, (each.baseline, each.system), strict=True)
        ),
        "Tokens are of an answer, its thinking included. *Cut* reached the most tokens; in *none* "
        "there was nothing to grade; *failed* requests are left out of all else.",
        *(f"- {warning}" for warning in found.warnings),
    ]
    return "\n\n".join(parts)
