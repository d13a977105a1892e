"""Measure what sparse decode costs a served language model, on texts, against dense decoding.

    python -m scripts.fetch_model smollm2
    python -m scripts.score_text --out results/texts
    python -m scripts.score_text --model-path DIR --text FILE ... --context 4096 --tokens 256 \\
        --systems oracle quest window cache-rank cache-rank:kv_residency=hack \\
        --budgets 64 128 384 --out results/texts

Each system is served in turn and decodes the first --context tokens of each text: the tokens are
forced, so that all decode the same ones, and their distributions at the last --tokens are compared
over the whole vocabulary. Dense decoding is always served, to compare with. A label may leave its
budget to the server, `inline:sparse_budget=null`. Writes results.json, results.md and a plot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from scripts.language.scoring import score
from scripts.shared.command import make_parser, run
from scripts.shared.comparison import add_options, read_options
from scripts.shared.serving import ServerError
from scripts.shared.systems import CACHE_RANK, DECODE_MODES, INLINE
from sglang_ext.calibration.texts import TEXTS, find_text

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
    """The command line."""
    parser = make_parser("score_text", __doc__)
    add_options(parser, "smollm2", (*DECODE_MODES, INLINE, CACHE_RANK), (64, 128, 384), SETTINGS)
    add = parser.add_argument
    add("--text", nargs="+", metavar="FILE",
        help=f"files, or names of {', '.join(TEXTS)}; default: the first eight, without a GPU "
        f"{', '.join(SCORED_ON_CPU)}")  # fmt: skip
    add("--context", type=int, default=4096, help="tokens of each text; default: %(default)s")
    add("--tokens", type=int, help="last tokens, which count; default: 256, without a GPU 64")
    add("--warm-up", type=int, default=24,
        help="tokens before those, while systems become sparse; default: %(default)s")  # fmt: skip
    options = read_options(parser, argv, SETTINGS)
    if options.tokens is None:
        options.tokens = 256 if options.gpus else 64
    if options.text is None:
        options.text = SCORED_TEXTS if options.gpus else SCORED_ON_CPU
    if min(options.tokens, options.warm_up) < 1:
        parser.error("--tokens and --warm-up must be at least 1")
    if options.context <= options.tokens + options.warm_up + options.settings["recent_tokens"]:
        parser.error("--context must be longer than --tokens, --warm-up and recent tokens together")
    try:
        options.texts = [find_text(name) for name in options.text]
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv: Sequence[str]) -> int:
    """Score; the exit status."""
    options = parse_options(argv)
    try:
        found, files = score(options, argv)
    except (ServerError, ValueError) as error:
        sys.exit(f"error: {error}")
    for path in files:
        print(path)
    return 1 if found.run.failures else 0


if __name__ == "__main__":
    run(main, "interrupted; what was scored is in --out")
