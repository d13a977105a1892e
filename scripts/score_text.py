"""Measure what sparse decode costs a served language model, on texts, against dense decoding.

    python -m scripts.fetch_model smollm2
    python -m scripts.score_text --out results/texts
    python -m scripts.score_text --model-path DIR --text FILE ... --context 4096 --tokens 256 \\
        --systems oracle quest window cache-rank cache-rank:query_predictor=ema \\
        --budgets 64 128 384 --out results/texts

Each system is served in turn and decodes the first --context tokens of each text: the tokens are
forced, so that all decode the same ones, and their distributions at the last --tokens are compared
over the whole vocabulary. Dense decoding is always served, to compare with. Writes scores.jsonl as
results come, which `--resume` goes on from, then results.json, results.md and plots.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.language.options import add_options, check_model, read_options
from scripts.language.scoring import score
from scripts.shared.command import make_parser
from scripts.shared.serving import ServerError, stop_on_sigterm
from sglang_ext.calibration.texts import TEXTS, find_text

BUDGETS = (64, 128, 384)

SCORED_TEXTS = tuple(TEXTS)[:8]
SCORED_ON_CPU = SCORED_TEXTS[::2]


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("score_text", __doc__)
    add = parser.add_argument
    add_options(parser, BUDGETS)
    add("--text", nargs="+", metavar="FILE",
        help=f"files, or names of {', '.join(TEXTS)}; default: the first eight, without a GPU "
        f"{', '.join(SCORED_ON_CPU)}")  # fmt: skip
    add("--context", type=int, default=4096, help="tokens of each text; default: %(default)s")
    add("--tokens", type=int, help="last tokens, which count; default: 256, without a GPU 64")
    add("--warm-up", type=int, default=24,
        help="tokens before those, while systems become sparse; default: %(default)s")  # fmt: skip
    options = read_options(parser, argv)
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
    check_model(parser, options)
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
    stop_on_sigterm()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("interrupted; what was scored is kept, for --resume")
