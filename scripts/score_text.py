"""Measure what sparse decode costs a served language model, on texts, against dense decoding.

    python -m scripts.fetch_model smollm2
    python -m scripts.score_text --out results/texts
    python -m scripts.score_text --model-path DIR --text FILE ... --context 4096 --tokens 256 \\
        --systems oracle quest window cache-rank cache-rank:kv_residency=hack \\
        --budgets 64 128 384 --out results/texts

Each system is served in turn and decodes the first --context tokens of each text: the tokens are
forced, so that all decode the same ones, and their distributions at the last --tokens are compared
over the whole vocabulary. Dense decoding is always served, to compare with. A label may leave its
budget to the server, `inline:sparse_budget=null`. Writes results.json and results.md.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
from transformers import AutoTokenizer

from scripts.language import forcing
from scripts.language.forcing import Forced, force
from scripts.language.report import Report, Score, TextRun, compare, markdown
from scripts.shared import comparison
from scripts.shared.command import UsageError, explained, make_parser, run
from scripts.shared.models import folder_of
from scripts.shared.report import write_report
from scripts.shared.serving import Client, ServerError
from scripts.shared.systems import CACHE_RANK, DECODE_MODES, DENSE, INLINE, System
from sglang_ext.calibration.texts import LONGEST_TOKEN, TEXTS, find_text

SETTINGS: dict[str, Any] = {
    "sink_tokens": 4,
    "recent_tokens": 64,
    "hysteresis": 0,
    "bulk_chunk_tokens": 8192,
    "kv_residency": "bf16",
}
"""All that is selected may enter in one step, as it does in the baselines, and keys are as they
came: what a format loses is asked for by its name."""

SCORED_TEXTS = tuple(TEXTS)[:8]
SCORED_ON_CPU = SCORED_TEXTS[::2]


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; UsageError if it is wrong."""
    parser = make_parser("score_text", __doc__)
    comparison.add_options(
        parser, "smollm2", (*DECODE_MODES, INLINE, CACHE_RANK), (64, 128, 384), SETTINGS
    )
    add = parser.add_argument
    add("--text", nargs="+", metavar="FILE",
        help=f"files, or names of {', '.join(TEXTS)}; default: the first eight, without a GPU "
        f"{', '.join(SCORED_ON_CPU)}")  # fmt: skip
    add("--context", type=int, default=4096, help="tokens of each text; default: %(default)s")
    add("--tokens", type=int, help="last tokens, which count; default: 256, without a GPU 64")
    add("--warm-up", type=int, default=24,
        help="tokens before those, while systems become sparse; default: %(default)s")  # fmt: skip
    options = comparison.read_options(parser, argv, SETTINGS)
    if options.tokens is None:
        options.tokens = 256 if options.gpus else 64
    if options.text is None:
        options.text = SCORED_TEXTS if options.gpus else SCORED_ON_CPU
    if min(options.tokens, options.warm_up) < 1:
        raise UsageError("--tokens and --warm-up must be at least 1")
    if options.context <= options.tokens + options.warm_up + options.settings["recent_tokens"]:
        raise UsageError(
            "--context must be longer than --tokens, --warm-up and recent tokens together"
        )
    options.texts = [explained(find_text)(name) for name in options.text]
    return options


class Tokens(NamedTuple):
    """A text as the model reads it: what is prefilled, and what is decoded."""

    name: str
    prompt: list[int]
    forced: list[int]


def tokenize(options: argparse.Namespace) -> list[Tokens]:
    """The first tokens of each text; UsageError if one is too short, or cannot be read."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder_of(options.model))
    before = options.context - options.tokens - options.warm_up
    found = []
    for text in options.texts:
        start = explained(text.read)()[: LONGEST_TOKEN * options.context]  # a book takes a minute
        ids = tokenizer(start)["input_ids"][: options.context]
        if len(ids) < options.context:
            raise UsageError(
                f"{text.name}: has {len(ids)} tokens, and {options.context} are needed"
            )
        found.append(Tokens(text.name, ids[:before], ids[before:]))
    return found


def _score(
    options: argparse.Namespace, system: System, text: str, dense: Forced, forced: Forced
) -> Score:
    """Compare a system with dense decoding; ServerError if it was dense in tokens that count."""
    statistics = forced.statistics
    first = len(forced.tokens) - options.tokens  # that counts
    # The first token comes from the prefill, which is dense in every system.
    sparse_from = 1 if system.is_sparse else first
    if system.has_cache_rank:  # the last tokens are sparse
        sparse_from = len(forced.tokens) - statistics.get("sparse_steps", 0)
    if sparse_from > first:
        reason = statistics["dense_reason"] or "waits for its selection"
        raise ServerError(
            f"{text}: attention was dense for {sparse_from} tokens ({reason}): --warm-up "
            f"{first} is too short"
        )
    expected, found = (run.log_probabilities(first) for run in (dense, forced))
    divergence = compare(expected, found, forced.tokens[first:])
    label, budget = system.without_budget()
    attended = statistics.get("attended_tokens") if system.is_sparse else options.context
    if not attended:  # only selection in SGLang's process says it
        parts = {**options.settings, **system.changes}
        most = parts["sink_tokens"] + parts["sparse_budget"] + parts["recent_tokens"] + 1
        attended = min(options.context, most)
    return Score(
        text=text,
        system=label,
        budget=budget,
        attended=attended,
        **msgspec.structs.asdict(divergence),
        sparse_from=sparse_from if system.is_sparse else None,
        late_steps=statistics.get("late_steps", 0),
        stale_steps=statistics.get("stale_steps", 0),
    )


def score(options: argparse.Namespace, argv: Sequence[str]) -> TextRun:
    """Score all systems, and write what there is, also of an interrupted run."""
    texts = tokenize(options)
    found = TextRun.of(
        "score_text",
        argv,
        options,
        context=options.context,
        scored=options.tokens,
        warm_up=options.warm_up,
        texts={text.name: text.sha256 for text in options.texts},
    )
    options.server_flags = [*forcing.SERVER_FLAGS, *options.server_flags]
    load = comparison.Load(len(texts), len(texts) * options.context, len(texts[0].prompt))
    scores: list[Score] = []
    dense: list[Forced] = []  # comes first, and the others are scored against it

    def decode(server: Client, system: System) -> None:
        folder = options.out / "logits" / system.label.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)

        def one(text: Tokens) -> Forced:
            return force(server, text.prompt, text.forced, folder / f"{text.name}.float32")

        with ThreadPoolExecutor(len(texts)) as pool:
            decoded = list(pool.map(one, texts))
        if system.label == DENSE:
            dense.extend(decoded)
            return
        for text, expected, forced in zip(texts, dense, decoded, strict=True):
            scores.append(_score(options, system, text.name, expected, forced))
            forced.file.unlink()

    try:
        comparison.serve_each([System.parse(DENSE)], options, load, found, decode)
        if DENSE in found.failures:
            raise ServerError(f"dense decoding failed: {found.failures[DENSE]}")
        others = [system for system in comparison.make_systems(options) if system.label != DENSE]
        comparison.serve_each(others, options, load, found, decode)
    finally:
        shutil.rmtree(options.out / "logits", ignore_errors=True)
        report = Report(found, scores)
        print(*write_report(options.out, "results", report, markdown(report)), sep="\n")
    return found


def main(argv: Sequence[str]) -> int:
    return int(bool(score(parse_options(argv), argv).failures))


if __name__ == "__main__":
    run(main, "interrupted; what was scored is in --out")
