"""Two runs of the same questions, compared question by question: figures, tables and a plot.

Thirty questions of AIME are a small sample: what the mean would be on other thirty is uncertain by
seven to nine points, however often each is asked. Most of that is how hard the questions are, which
two systems share. So every figure of a difference here is a mean of differences within questions,
and its interval is over questions; it holds the noise of a few answers to each as well.

Accuracy alone does not say what sparse attention costs: it can also make chains of thought longer
(Less is Less, arXiv 2601.03043; Hold Onto That Thought, arXiv 2512.12008), and so lose in tokens
what it gains in time per token. Lengths, truncated answers and tokens a right answer stand beside.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from scripts.accuracy import statistics
from scripts.accuracy.benchmarks.runs import Record, Run, read_run
from scripts.accuracy.statistics import Estimate
from scripts.shared import plots, report
from scripts.shared.report import number, table

POOLED = "pooled"

# These differ between any two servers and mean nothing.
_VOLATILE = frozenset(
    "host port nccl_port dist_init_addr random_seed startup_time kv_events served_model_name "
    "tokenizer_path max_req_input_len".split()
)
# These must not differ, beside the sampling and the questions.
_SAME = ("reasoning_parser", "sampling_defaults", "chat_template")


class Summary(msgspec.Struct):
    """One system on one benchmark."""

    accuracy: Estimate  # share of right answers, the mean over questions, in [0, 1]
    tokens: Estimate  # mean length of an answer, its thinking included
    tokens_per_right_answer: float | None  # tokens of all answers over the number of right ones
    seconds: float  # time of an answer, with as many requests at a time as the run had
    truncated: float  # share of answers that reached the most tokens
    unanswered: float  # share in which nothing could be read as an answer
    failed: float  # share of requests that failed; they are left out of all else


class Comparison(msgspec.Struct):
    """Two systems on one benchmark, or on all of them pooled."""

    benchmark: str  # its name, or `pooled`
    questions: int
    repeats: int  # repeats of the benchmark that has most
    baseline: Summary
    system: Summary
    accuracy_difference: Estimate  # system less baseline, in [-1, 1]
    tokens_ratio: Estimate  # the system's mean over the baseline's
    gained: int  # questions with more right answers than the baseline's
    lost: int  # questions with fewer


class Report(msgspec.Struct):
    """Everything that is said of two folders of runs; `comparison.json`.

    Pairs are of the baseline and the system.
    """

    names: tuple[str, str]
    comparisons: list[Comparison]  # one a benchmark, and the pooled one if there are several
    settings: dict[str, dict[str, Any]]  # what both runs share, by benchmark
    server_differences: dict[str, tuple[Any, Any]]  # flags of the servers that differ
    counters: dict[str, tuple[dict[str, float], dict[str, float]]]  # of its runs, by benchmark
    warnings: list[str]  # warnings of all runs


def compare_folders(baseline: Path, system: Path) -> Report:
    """Compare all benchmarks that both folders hold.

    Args:
        baseline, system: folders that `run --out` named; their last parts name the systems.

    Raises:
        FileNotFoundError: a folder, or a benchmark of one, is missing in the other.
        ValueError: two runs are not of the same questions, sampled and read in the same way, or
            one was cut short.
    """
    names = (baseline.resolve().name, system.resolve().name)
    if names[0] == names[1]:
        names = (str(baseline), str(system))
    pairs = {
        name: (read_run(baseline / name), read_run(system / name))
        for name in _common(baseline, system)
    }
    settings = {name: _shared_settings(one, other) for name, (one, other) in pairs.items()}
    comparisons = [compare(name, [pair]) for name, pair in pairs.items()]
    if len(pairs) > 1:
        comparisons.append(compare(POOLED, list(pairs.values())))
    differences: dict[str, tuple[Any, Any]] = {}
    for one, other in pairs.values():
        differences |= _server_differences(one.record, other.record)
    return Report(
        names=names,
        comparisons=comparisons,
        settings=settings,
        server_differences=differences,
        counters={
            name: (one.record.counters.cache_rank, other.record.counters.cache_rank)
            for name, (one, other) in pairs.items()
        },
        warnings=[
            f"{name}, {benchmark}: {warning}"
            for benchmark, pair in pairs.items()
            for name, run in zip(names, pair, strict=True)
            for warning in run.record.warnings
        ],
    )


def compare(name: str, pairs: Sequence[tuple[Run, Run]]) -> Comparison:
    """Compare pairs of runs, all questions of all pairs alike.

    Args:
        name: name of the comparison.
        pairs: baseline and system of one benchmark each.

    Raises:
        ValueError: every request of a question failed, or there are fewer than two questions.
    """
    baseline, system = (
        pd.concat({run.record.benchmark: run.answers for run in runs})
        for runs in zip(*pairs, strict=True)
    )
    # Means over repeats, one row a question.
    means, others = (
        answers.groupby(level=[0, 1], sort=False)[["correct", "tokens"]].mean()
        for answers in (baseline, system)
    )
    if means.isna().any(axis=None) or others.isna().any(axis=None):
        raise ValueError(f"{name}: every request of a question failed; run it again")
    difference = others.correct - means.correct
    return Comparison(
        benchmark=name,
        questions=len(means),
        repeats=max(one.record.sampling.repeats for one, _ in pairs),
        baseline=_summarize(baseline, means),
        system=_summarize(system, others),
        accuracy_difference=statistics.difference(others.correct, means.correct),
        tokens_ratio=statistics.ratio(others.tokens, means.tokens),
        gained=int((difference > 0).sum()),
        lost=int((difference < 0).sum()),
    )


def _summarize(answers: pd.DataFrame, means: pd.DataFrame) -> Summary:
    """One system, from its answers and their means over repeats."""
    total, answered = answers.sum(), answers[~answers.failed].mean().to_dict()
    return Summary(
        accuracy=statistics.mean(means.correct),
        tokens=statistics.mean(means.tokens),
        tokens_per_right_answer=float(total.tokens / total.correct) if total.correct else None,
        **{name: answered[name] for name in ("seconds", "truncated", "unanswered")},
        failed=float(answers.failed.mean()),
    )


def _common(baseline: Path, system: Path) -> list[str]:
    one, other = (
        {record.parent.name for record in folder.glob("*/run.json")}
        for folder in (baseline, system)
    )
    if unpaired := one ^ other:
        raise FileNotFoundError(
            f"{baseline} and {system} do not both have a run of {', '.join(sorted(unpaired))}"
        )
    if not one:
        raise FileNotFoundError(f"{baseline} holds no runs")
    return sorted(one)


def _shared_settings(one: Run, other: Run) -> dict[str, Any]:
    ours, theirs = _settings(one.record), _settings(other.record)
    if different := [name for name in ours if ours[name] != theirs[name]]:
        raise ValueError(
            f"{one.folder} and {other.folder} cannot be compared: "
            + "; ".join(f"{name} is {ours[name]!r} and {theirs[name]!r}" for name in different)
        )
    return ours


def _settings(record: Record) -> dict[str, Any]:
    """What two runs must share."""
    return {
        # The folder that holds a model may differ between machines, its name should not.
        "model": Path(str(record.server.get("model_path"))).name,
        **{name: record.server.get(name) for name in _SAME},
        **msgspec.to_builtins(record.sampling),
        "questions": record.questions,
        "questions_sha256": record.questions_sha256,
        "harness": f"sgl-eval {record.versions['sgl-eval']}",
    }


def _server_differences(one: Record, other: Record) -> dict[str, tuple[Any, Any]]:
    names = sorted((one.server.keys() | other.server.keys()) - _VOLATILE)
    sides = {name: (one.server.get(name), other.server.get(name)) for name in names}
    sides["asked to stay dense"] = one.dense, other.dense
    sides["requests at a time"] = one.threads, other.threads
    return {name: values for name, values in sides.items() if values[0] != values[1]}


def write_report(found: Report, out: Path) -> list[Path]:
    """Write comparison.json, comparison.md and comparison.png; the files."""
    files = report.write_report(out, "comparison", found, markdown(found))
    return [*files, *_plot(found, out / "comparison")]


def markdown(found: Report) -> str:
    """All tables."""
    baseline, system = found.names
    parts = [
        f"# {system} against {baseline}",
        "Accuracy is the share of right answers, the mean over questions. Differences are of the "
        "same questions; [low, high] is a 95% interval from resampling questions. One that holds 0 "
        "does not show that the two are equal: it shows which differences are excluded.",
        _accuracy_table(found),
        _length_table(found),
        "Tokens are of an answer, its thinking included. *Cut* reached the most tokens; in *none* "
        "there was nothing to grade; *failed* requests are left out of all else. Seconds of an "
        "answer depend on how many requests ran at a time.",
    ]
    if found.warnings:
        parts += ["## Warnings", "\n".join(f"- {warning}" for warning in found.warnings)]
    parts += ["## What was run", _settings_table(found)]
    if found.server_differences:
        rows = [
            [name, *(f"`{_plain(value)}`" for value in values)]
            for name, values in found.server_differences.items()
        ]
        parts += ["What differs:", table(["", baseline, system], rows)]
    counters = [
        [benchmark, name, *(f"{side.get(name, 0):.1f}".removesuffix(".0") for side in sides)]
        for benchmark, sides in found.counters.items()
        for name in sorted(sides[0].keys() | sides[1].keys())
    ]
    if counters:
        header = ["benchmark", "", baseline, system]
        parts += ["The cache ranks during the runs:", table(header, counters)]
    return "\n\n".join(parts)


def _accuracy_table(found: Report) -> str:
    header = ["benchmark", "questions × answers", *found.names, "difference, points"]
    rows = [
        [
            c.benchmark,
            f"{c.questions} × {c.repeats}" if c.benchmark in found.settings else f"{c.questions}",
            _interval(c.baseline.accuracy, 100, "%"),
            _interval(c.system.accuracy, 100, "%"),
            _interval(c.accuracy_difference, 100, sign=True),
            f"{c.gained} / {c.lost}",
        ]
        for c in found.comparisons
    ]
    return table([*header, "questions better / worse"], rows)


def _length_table(found: Report) -> str:
    header = ["benchmark", "", "tokens", "ratio", "tokens a right answer"]
    rows = [
        [
            *(c.benchmark, name, f"{arm.tokens.value:.0f}"),
            _interval(c.tokens_ratio, digits=3) if arm is c.system else "",
            number(arm.tokens_per_right_answer, 0),
            *(f"{100 * share:.1f}%" for share in (arm.truncated, arm.unanswered, arm.failed)),
            number(arm.seconds, 1),
        ]
        for c in found.comparisons
        for name, arm in zip(found.names, (c.baseline, c.system), strict=True)
    ]
    return table([*header, "cut", "none", "failed", "seconds"], rows)


def _settings_table(found: Report) -> str:
    names = next(iter(found.settings.values()))
    rows = [
        [name, *(f"`{_plain(settings[name])}`" for settings in found.settings.values())]
        for name in names
        if any(settings[name] not in (None, "") for settings in found.settings.values())
    ]
    return table(["", *found.settings], rows)


def _interval(
    estimate: Estimate, scale: float = 1, unit: str = "", digits: int = 1, sign: bool = False
) -> str:
    plus = "+" if sign else ""
    value, low, high = (f"{scale * end:{plus}.{digits}f}" for end in estimate)
    return f"{value}{unit} [{low}, {high}]"


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "/").replace("\n", " ").strip() or "–"


def _plot(found: Report, stem: Path) -> list[Path]:
    """Differences and their intervals, one line a benchmark: accuracy, then length."""
    if not plots.can_draw():
        return []
    baseline, system = found.names
    comparisons = found.comparisons
    figure, panels = plots.panels(2, (9, 1.6 + 0.4 * len(comparisons)), sharey=True)
    series = (
        ("accuracy, points", 0, 100, [c.accuracy_difference for c in comparisons]),
        ("tokens of an answer, ratio", 1, 1, [c.tokens_ratio for c in comparisons]),
    )
    for axes, (label, equal, scale, estimates) in zip(panels, series, strict=True):
        for line, estimate in enumerate(estimates):
            value, low, high = (scale * end for end in estimate)
            axes.plot([low, high], [line, line], color=plots.COLOURS[0], linewidth=2)
            axes.plot([value], [line], "o", color=plots.COLOURS[0])
        axes.axvline(equal, color=plots.COLOURS[7], linewidth=1)
        plots.label(axes, x=label)
        axes.spines["left"].set_visible(False)
    panels[0].set_yticks(range(len(comparisons)), [c.benchmark for c in comparisons])
    panels[0].invert_yaxis()
    figure.suptitle(f"{system} against {baseline}, 95% intervals over questions", fontsize=10)
    return plots.save(figure, stem, ("png",))
