"""Draw what was measured.

    python -m scripts.plot tradeoff --texts results/texts --speed results/speed \\
        --curve quest quest quest \\
        --estimate "cache rank" cache-rank:calibration=calibrations/smollm2 cache-rank

`tradeoff` draws what a user decides by: KL of a language model, as `score_text` has recorded it,
against time per token and tokens a second, as `profile_tpot` has, a curve a system, at the same
shares of the context. A curve takes its name, the label of the system in the record of texts, and
that in the record of speed, both without a budget; `dense` in place of the first is a system that
attends to everything. Steps of an `--estimate` are the planner's, and are drawn dashed. Without
either, the systems are drawn that both records have under the same label.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import msgspec

from scripts.language.records import Report
from scripts.shared.command import explained, make_parser
from scripts.speed.jobs import Shape
from scripts.speed.report import read_results
from scripts.tradeoff import report
from scripts.tradeoff.points import Curve, curves_in_common, points_of
from scripts.tradeoff.steps import EstimatedSteps, MeasuredSteps
from sglang_ext.planning import GPUS


def parse_options(argv: Sequence[str]) -> Namespace:
    """The command line."""
    parser = make_parser("plot", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tradeoff = commands.add_parser("tradeoff", help="divergence against the time of a step")
    add = tradeoff.add_argument
    add("--texts", type=Path, required=True, help="a folder of score_text")
    add("--speed", type=Path, nargs="+", default=[], help="folders of profile_tpot; of steps that "
        "several have, the first one's count")  # fmt: skip
    labels = ("NAME", "TEXTS_LABEL", "SPEED_LABEL")
    add("--curve", nargs=3, action="append", default=[], metavar=labels, help="with measured steps")
    add("--estimate", nargs=3, action="append", default=[], metavar=labels,
        help="with estimated steps")  # fmt: skip
    add("--model", default="qwen3-8b", help="of the steps; default: %(default)s")
    add("--shape", type=explained(Shape.parse), default=Shape(8, 32768), metavar="BATCHxCONTEXT",
        help="of the steps; default: %(default)s")  # fmt: skip
    add("--gpu", choices=list(GPUS), default="H200", help="of the estimates; default: %(default)s")
    add("--output", type=Path, default=Path("results/tradeoff"), help="a folder")
    tradeoff.set_defaults(run=draw_tradeoff)
    return parser.parse_args(argv)


def draw_tradeoff(options: Namespace) -> list[Path]:
    """Draw divergence against the time of a step; the files.

    Raises:
        ValueError: a record is missing, or lacks what is to be drawn.
    """
    texts, *records = (
        folder / "results.json" if folder.is_dir() else folder
        for folder in (options.texts, *options.speed)
    )
    if missing := [str(path) for path in (texts, *records) if not path.is_file()]:
        raise ValueError(f"no record {', '.join(missing)}")
    scored = msgspec.json.decode(texts.read_bytes(), type=Report)
    speed = [read_results(path) for path in records]
    measured = MeasuredSteps(speed, options.model, options.shape)
    estimated = EstimatedSteps(options.model, options.shape, options.gpu)
    curves = [Curve(*labels) for labels in options.curve]
    estimates = [Curve(*labels) for labels in options.estimate]
    if not curves and not estimates:
        curves = curves_in_common(scored, measured)
    points = [
        *(point for curve in curves for point in points_of(curve, scored, measured)),
        *(point for curve in estimates for point in points_of(curve, scored, estimated)),
    ]
    if not points:
        raise ValueError("no system is in both records: name some by --curve")
    conditions = report.describe(
        scored, speed, options.model, options.shape, options.gpu if estimates else ""
    )
    return report.write(report.Tradeoff(conditions, points), options.output)


def main(arguments: Sequence[str]) -> int:
    """Draw; the exit status."""
    options = parse_options(arguments)
    try:
        files = options.run(options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in files:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
