"""Two runs of the same questions, compared question by question.

Thirty questions of AIME are a small sample: what the mean would be on other thirty is uncertain by
seven to nine points, however often each is asked. Most of that is how hard the questions are, which
two systems share. So every figure of a difference here is a mean of differences within questions,
and its interval is over questions; it holds the noise of a few answers to each as well.

Accuracy alone does not say what sparse attention costs: it can also make chains of thought longer
(Less is Less, arXiv 2601.03043; Hold Onto That Thought, arXiv 2512.12008), and so lose in tokens
what it gains in time per token. Lengths, truncated answers and tokens a right answer stand beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from scripts.accuracy import statistics
from scripts.accuracy.benchmarks.harness import Answers
from scripts.accuracy.benchmarks.runs import Run, read_run
from scripts.accuracy.statistics import Estimate

POOLED = "pooled"

# These differ between any two servers and mean nothing.
_VOLATILE = frozenset(
    "host port nccl_port dist_init_addr random_seed startup_time kv_events served_model_name "
    "tokenizer_path max_req_input_len".split()
)
# These must not differ, beside the sampling and the questions.
_SAME = ("model", "reasoning_parser", "sampling_defaults", "chat_template")


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
    counters: dict[
        str, tuple[dict[str, float], dict[str, float]]
    ]  # counters of its run, by benchmark
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
    pairs = [_read_pair(baseline / name, system / name) for name in _common(baseline, system)]
    names = (baseline.resolve().name, system.resolve().name)
    if names[0] == names[1]:
        names = (str(baseline), str(system))
    comparisons = [compare(one.record.benchmark, [(one, other)]) for one, other in pairs]
    if len(pairs) > 1:
        comparisons.append(compare(POOLED, pairs))
    return Report(
        names=names,
        comparisons=comparisons,
        settings={one.record.benchmark: _settings(one) for one, _ in pairs},
        server_differences=_server_differences(pairs),
        counters={
            one.record.benchmark: (
                one.record.counters.cache_rank,
                other.record.counters.cache_rank,
            )
            for one, other in pairs
        },
        warnings=[
            f"{name}, {run.record.benchmark}: {warning}"
            for pair in pairs
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
    baselines = [one.answers for one, _ in pairs]
    systems = [other.answers for _, other in pairs]
    right = [_by_question([a.correct for a in arm], name) for arm in (baselines, systems)]
    tokens = [_by_question([a.tokens for a in arm], name) for arm in (baselines, systems)]
    difference = right[1] - right[0]
    return Comparison(
        benchmark=name,
        questions=len(difference),
        repeats=max(answers.correct.shape[1] for answers in baselines),
        baseline=_summarize(baselines, right[0], tokens[0]),
        system=_summarize(systems, right[1], tokens[1]),
        accuracy_difference=statistics.difference(right[1], right[0]),
        tokens_ratio=statistics.ratio(tokens[1], tokens[0]),
        gained=int((difference > 0).sum()),
        lost=int((difference < 0).sum()),
    )


def _summarize(
    arm: Sequence[Answers], right: NDArray[np.float64], tokens: NDArray[np.float64]
) -> Summary:
    answered = sum(int((~answers.failed).sum()) for answers in arm)
    rights = sum(float(np.nansum(answers.correct)) for answers in arm)
    written = sum(float(np.nansum(answers.tokens)) for answers in arm)
    return Summary(
        accuracy=statistics.mean(right),
        tokens=statistics.mean(tokens),
        tokens_per_right_answer=written / rights if rights else None,
        seconds=sum(float(np.nansum(answers.seconds)) for answers in arm) / answered,
        truncated=sum(int(answers.truncated.sum()) for answers in arm) / answered,
        unanswered=sum(int(answers.unanswered.sum()) for answers in arm) / answered,
        failed=1 - answered / sum(answers.failed.size for answers in arm),
    )


def _by_question(arrays: Iterable[NDArray[np.float64]], name: str) -> NDArray[np.float64]:
    """Means over repeats; [questions] of all arrays, one after the other."""
    for array in (arrays := list(arrays)):
        if np.isnan(array).all(axis=1).any():
            raise ValueError(f"{name}: every request of a question failed; run it again")
    return np.concatenate([np.nanmean(array, axis=1) for array in arrays])


def _common(baseline: Path, system: Path) -> list[str]:
    found = [
        {record.parent.name for record in folder.glob("*/run.json")}
        for folder in (baseline, system)
    ]
    if unpaired := found[0] ^ found[1]:
        raise FileNotFoundError(
            f"{baseline} and {system} do not both have a run of {', '.join(sorted(unpaired))}"
        )
    if not found[0]:
        raise FileNotFoundError(f"{baseline} holds no runs")
    return sorted(found[0])


def _read_pair(baseline: Path, system: Path) -> tuple[Run, Run]:
    one, other = read_run(baseline), read_run(system)
    ours, theirs = _settings(one), _settings(other)
    if different := [name for name in ours if ours[name] != theirs[name]]:
        raise ValueError(
            f"{baseline} and {system} cannot be compared: "
            + "; ".join(f"{name} is {ours[name]!r} and {theirs[name]!r}" for name in different)
        )
    return one, other


def _settings(run: Run) -> dict[str, Any]:
    """What two runs must share."""
    record = run.record
    # The folder that holds a model may differ between machines, its name should not.
    model = Path(str(record.server.get("model_path"))).name
    server = {name: record.server.get(name) for name in _SAME if name != "model"}
    return {
        "model": model,
        **server,
        **msgspec.to_builtins(record.sampling),
        "questions": record.questions,
        "questions_sha256": record.questions_sha256,
        "harness": f"sgl-eval {record.versions['sgl-eval']}",
    }


def _server_differences(pairs: Sequence[tuple[Run, Run]]) -> dict[str, tuple[Any, Any]]:
    differences: dict[str, tuple[Any, Any]] = {}
    for one, other in pairs:
        records = one.record, other.record
        names = (records[0].server.keys() | records[1].server.keys()) - _VOLATILE
        for name in sorted(names):
            values = records[0].server.get(name), records[1].server.get(name)
            if values[0] != values[1]:
                differences[name] = values
        if records[0].dense != records[1].dense:
            differences["asked to stay dense"] = records[0].dense, records[1].dense
        if records[0].threads != records[1].threads:
            differences["requests at a time"] = records[0].threads, records[1].threads
    return differences
