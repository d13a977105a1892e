"""The command line of sgl-eval, and why each option is set.

Everything that its defaults would get wrong for a comparison of two systems is decided here. The
reasons were read in version 0.1.3, the one that the extra `eval` installs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.accuracy.benchmarks.questions import Benchmark


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How answers are sampled and read: what two runs must share to be compared.

    Attributes:
        repeats: answers to each question.
        temperature, top_p: those of the model's card. The harness's own temperature is 0, at which
            all repeats are one answer.
        top_k: tokens to sample from; None leaves it to the server, which takes it from the model's
            generation_config.json.
        max_tokens: longest answer, its thinking included. Reasoning needs room: a chain that is cut
            short hides what happens at the end of a long one, where a cache rank has most to lose.
        thinking: what the chat template is told as `enable_thinking`.
        prompt: text of a prompt file of the harness, in the place of the benchmark's own; empty is
            its own.
    """

    repeats: int
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int | None = None
    max_tokens: int = 32768
    thinking: bool = True
    prompt: str = ""

    def __post_init__(self) -> None:
        if self.repeats > 1 and self.temperature == 0:
            raise ValueError(
                f"{self.repeats} repeats at temperature 0 are one answer {self.repeats} times: "
                "give --temperature, or --n-repeats 1"
            )


def harness_version() -> str:
    """The version of sgl-eval.

    Raises:
        ModuleNotFoundError: it is not installed, with the remedy.
    """
    try:
        return version("sgl-eval")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "sgl-eval is not installed: pip install --editable '.[eval]'"
        ) from error


def arguments(
    benchmark: Benchmark,
    questions: Path,
    prompt: Path | None,
    out: Path,
    base_url: str,
    sampling: Sampling,
    threads: int,
) -> list[str]:
    """The arguments of `sgl-eval`, which makes a folder in `out`.

    The file of questions is always given, so that what was asked is a file of the run and not
    whatever the harness or the hub holds that day. `prompt` is a file with the text of
    `sampling.prompt`, or None for the benchmark's own.
    """
    thinking = json.dumps(sampling.thinking)
    command = ["run", benchmark.harness, "--base-url", f"{base_url}/v1"]
    command += ["--from-dataset", str(questions), "--out-dir", str(out)]
    # No --seed: the harness would send the same one for all repeats.
    command += ["--n-repeats", str(sampling.repeats)]
    command += ["--temperature", str(sampling.temperature), "--top-p", str(sampling.top_p)]
    # Unset, an answer would be as long as the server lets it.
    command += ["--max-tokens", str(sampling.max_tokens)]
    # The harness sends `thinking`; the templates of Qwen3 read `enable_thinking`.
    command += ["--thinking" if sampling.thinking else "--no-thinking"]
    command += ["--chat-template-kwarg", f"enable_thinking={thinking}"]
    command += ["--num-threads", str(threads)]
    if prompt is not None:
        command += ["--prompt", str(prompt)]
    return command


def extra_body(sampling: Sampling, dense: bool) -> dict[str, Any]:
    """What every request holds beyond the options of the harness's command line."""
    body: dict[str, Any] = {}
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if dense:
        body["custom_params"] = {"cache_rank": False}
    return body


def run_harness(command: Sequence[str], body: Mapping[str, Any]) -> int:
    """Run `sgl-eval` in this process; its exit status.

    It shows progress, writes every answer as it comes, and ends at Ctrl-C with what it has. The
    command line has no option for the body; the benchmark's defaults do.
    """
    from sgl_eval import cli, registry

    spec = registry.get(command[1])
    spec.default_gen = dataclasses.replace(spec.default_gen, extra_body=dict(body) or None)
    return int(cli.main(list(command)))


def read_answers(out: Path, questions: Sequence[str], repeats: int) -> pd.DataFrame:
    """Read what the harness wrote.

    Args:
        out: the folder that `arguments` was given.
        questions: the ids that were asked.
        repeats: answers to each question.

    Returns:
        One row an answer, by the id of its question and in the order of the questions:

        correct       float, the grade, 1 or 0
        tokens        float, tokens of the answer, its thinking included
        seconds       float, from sending the request to its answer
        truncated     bool, the answer reached `max_tokens`
        unanswered    bool, nothing in the answer could be read as one
        failed        bool, the request failed; the numbers are NaN

    Raises:
        FileNotFoundError: the harness wrote no results.
        ValueError: answers are missing. Those of an interrupted run are the short ones, and its
            mean is no estimate of anything.
    """
    folder = next((path.parent for path in sorted(out.glob("sgl_eval_*/metrics.json"))), None)
    if folder is None:
        raise FileNotFoundError(f"{out} has no results: the run ended before the harness wrote any")
    rows: list[dict[str, Any]] = []
    for repeat in range(repeats):
        with (folder / f"output-rs{repeat}.jsonl").open(encoding="utf-8") as file:
            rows += map(json.loads, file)
    if len(rows) < (asked := len(questions) * repeats):
        raise ValueError(f"{folder} has {len(rows)} of {asked} answers: the run was cut short")
    written = pd.DataFrame(rows).set_index("id")
    failed = ~written.finish_reason.isin(["stop", "length"])
    seconds = written.generation_end_time - written.generation_start_time
    answers = pd.DataFrame(
        {
            "correct": written.symbolic_correct.astype(float).mask(failed),
            "tokens": written.num_generated_tokens.astype(float).mask(failed),
            "seconds": seconds.mask(failed),
            "truncated": written.finish_reason == "length",
            # The harness prints this rate only for repeats; it is told here for one, too.
            "unanswered": written.predicted_answer.isna() & ~failed,
            "failed": failed,
        }
    )
    return answers.loc[list(questions)]
