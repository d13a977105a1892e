"""Let a served language model write, with sparse decode and without, and compare what it wrote.

    python -m scripts.fetch_model smollm2
    python -m scripts.decode_text --out results/free
    python -m scripts.decode_text --model-path DIR --tasks question needle copy \\
        --lengths 1024 2048 4096 7168 --problems 16 --gpus 0 1 \\
        --systems oracle quest window cache-rank --budgets 64 128 384 --out results/free

Each system is served in turn and answers the same requests, greedily: questions about long texts,
which have no one right answer, and two tasks that a program checks, a needle in a text and a list
to repeat. Dense decoding is always served, to compare with. All answers begin with a few tokens
that are forced, so that attention is sparse by the first that counts. Writes answers.jsonl as
answers come, which `--resume` goes on from, then results.json, results.md and plots.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.language.decoding import decode
from scripts.language.options import add_options, check_model, read_options
from scripts.language.tasks import TASKS
from scripts.shared.command import make_parser
from scripts.shared.serving import ServerError, stop_on_sigterm

BUDGETS = (128,)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("decode_text", __doc__)
    add = parser.add_argument
    add_options(parser, BUDGETS)
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK",
        help="default: %(default)s")  # fmt: skip
    add("--lengths", type=int, nargs="+", default=[1024, 2048], metavar="TOKENS",
        help="of prompts; default: %(default)s")  # fmt: skip
    add("--problems", type=int, default=8, help="of a task and length; default: %(default)s")
    add("--max-tokens", type=int,
        help="of an answer to a question; default: 512, without a GPU 128")  # fmt: skip
    add("--opening", type=int, default=24,
        help="tokens of dense decoding's answers to questions that all others begin with, while "
        "they become sparse; default: %(default)s")  # fmt: skip
    add("--concurrency", type=int, help="requests at once; default: 64, without a GPU 8")
    options = read_options(parser, argv)
    if options.max_tokens is None:
        options.max_tokens = 512 if options.gpus else 128
    if options.concurrency is None:
        options.concurrency = 64 if options.gpus else 8
    if options.problems < 2:
        parser.error("--problems must be at least 2: an interval needs several problems")
    if min(options.concurrency, options.opening) < 1:
        parser.error("--concurrency and --opening must be at least 1")
    if options.max_tokens <= options.opening:
        parser.error("--max-tokens must be more than --opening, of which no token counts")
    check_model(parser, options)
    return options


def main(argv: Sequence[str]) -> int:
    """Decode; the exit status."""
    options = parse_options(argv)
    try:
        found, files = decode(options, argv)
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
        sys.exit("interrupted; what was answered is kept, for --resume")
