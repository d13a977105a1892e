"""Measure time per output token of several systems side by side, and write a table.

    python -m scripts.profile_tpot --model qwen3-8b --shapes 8x32768 16x32768 \
        --systems floor dense fp8 tp2 quest cache-rank cache-rank:dense_layers=0 --out results/
    python -m scripts.profile_tpot --model bundled --shapes 2x600 --systems dense cache-rank \
        --sparse-threshold 300 --sparse-budget 64                # without a GPU

Each system is served on GPUs of its own: one that fails is a line in the table, and its log is in
OUT/logs. The exit status is 1 then. Results are written as they come, in JSON and Markdown;
`--resume` measures what is missing, on the same machine and with the same settings.
Weights are random numbers in the shapes of `model_shapes`; see scripts.speed.weights for which.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.shared.command import explained, make_parser
from scripts.speed.jobs import Shape, add_engine_options
from scripts.speed.profile import profile


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("profile_tpot", __doc__)
    add = parser.add_argument
    add_engine_options(parser, budget=2048)
    add("--shapes", nargs="+", type=explained(Shape.parse), required=True, help="BATCHxCONTEXT")
    add("--repeats", type=int, default=3, help="windows of decode steps")
    add("--window", type=int, default=64, help="decode steps of a window")
    add("--skip-steps", type=int, help="steps before the first window; default: enough to settle")
    add("--shape-seconds", type=float, default=300.0, help="deadline of one shape")
    add("--resume", action="store_true", help="keep what OUT holds and measure the rest")
    options = parser.parse_args(argv)
    if min(options.repeats, options.window) < 1:
        parser.error("--repeats and --window must be at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_options(argv)
    try:
        return profile(options, argv)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
