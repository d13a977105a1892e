"""The questions of each benchmark, as one JSON line a question.

A line has `id`, `problem` and `expected_answer`, the shape that the harness reads. The years of
AIME come with the harness. GPQA Diamond and MATH-500 come from the hub; a machine without access
gets a file that another has made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

MATH500 = "HuggingFaceH4/MATH-500"

Question = Mapping[str, str]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: on our command line; `custom` is problems of one's own, with answers as in MATH.
        harness: the harness's benchmark that prompts and grades it. All of its mathematics
            benchmarks share a prompt and a grader, so that MATH-500, which it does not list, runs
            under the name of one of them.
        repeats: answers to each question by default: the fewer questions, the more.
        load: its questions; may read the hub.
    """

    name: str
    harness: str
    repeats: int
    load: Callable[[], list[Question]]


def write_questions(questions: Iterable[Question], path: Path) -> None:
    """Write one line a question."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dict(question), ensure_ascii=False) for question in questions]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_questions(path: Path) -> list[Question]:
    """Read one line a question.

    Raises:
        ValueError: a line is not JSON, lacks a field, or repeats an id; a file without questions.
    """
    questions: dict[str, Question] = {}
    # Not splitlines(), which also splits at characters that a problem may hold.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            # The harness numbers questions without an id by line; do the same, in the open.
            name = str(row.get("id") or f"{path.stem}-{number - 1}")
            question = _question(name, row["problem"], row["expected_answer"])
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a JSON object: {error}") from error
        except KeyError as error:
            raise ValueError(f"{path}:{number}: a question needs the field {error}") from error
        if name in questions:
            raise ValueError(f"{path}:{number}: the id {name!r} is used twice")
        questions[name] = question
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return list(questions.values())


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def math500_question(row: Mapping[str, Any]) -> Question:
    """A row of MATH-500 as the hub holds it.

    Its `unique_id` is the path of the problem in MATH, such as `test/algebra/1072.json`.
    """
    return _question(row["unique_id"], row["problem"], row["answer"])


def _question(name: str, problem: str, answer: Any) -> Question:
    return {"id": name, "problem": problem, "expected_answer": str(answer)}


def _load_custom() -> list[Question]:
    raise ValueError("the benchmark `custom` is whatever --from-dataset holds")


def _load_math500() -> list[Question]:
    from datasets import load_dataset

    return [math500_question(row) for row in load_dataset(MATH500, split="test")]


def _load_of_harness(name: str) -> list[Question]:
    from sgl_eval.evals import _loader

    if name == "gpqa":
        # The seed that the harness itself shuffles the four choices with.
        load = _loader.load_via_prepare("gpqa", ["diamond"], {"random_seed": 42})
    else:
        load = _loader.load_bundled(name)
    return [
        _question(example.id, example.inputs["problem"], example.target) for example in load(None)
    ]


BENCHMARKS = {
    **{
        name: Benchmark(name, name, repeats, partial(_load_of_harness, name))
        for name, repeats in (("aime24", 16), ("aime25", 16), ("aime26", 16), ("gpqa", 8))
    },
    "math500": Benchmark("math500", "aime25", 4, _load_math500),
    "custom": Benchmark("custom", "aime25", 1, _load_custom),
}
