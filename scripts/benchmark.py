"""AIME, GPQA Diamond and MATH-500 on a running server, and a comparison of two servers.

    python -m scripts.benchmark run aime24 --base-url http://127.0.0.1:30000 --out dense
    python -m scripts.benchmark run gpqa --from-dataset gpqa.jsonl --base-url ... --out dense
    python -m scripts.benchmark compare dense cache-rank

Questions are asked and graded by sgl-eval, which `pip install --editable '.[eval]'` brings. The
defaults of sampling are those of the cards of reasoning models; docs/guide.md, under "Evaluation",
says how to serve and how to read the result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.comparison import compare_folders, markdown
from scripts.accuracy.runs import BENCHMARKS, run_benchmark
from scripts.shared.command import command_line, make_parser, run
from scripts.shared.report import write_report


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("benchmark", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    add = commands.add_parser("run", help="ask a server all questions of a benchmark").add_argument
    add("benchmark", choices=BENCHMARKS)
    add("--base-url", required=True, help="of the server, with or without /v1")
    add("--out", type=Path, required=True, help="folder of this system; its name is the system's")
    add("--from-dataset", type=Path, metavar="FILE", help="questions, one JSON object a line: "
        "id, problem, expected_answer")  # fmt: skip
    add("--num-examples", type=int, help="ask the first questions only")
    add("--n-repeats", type=int, help="answers to each question; default: 16 AIME, 8 GPQA, "
        "4 MATH-500")  # fmt: skip
    add("--temperature", type=float, default=0.6)
    add("--top-p", type=float, default=0.95)
    add("--top-k", type=int, help="default: the server's, from the model's generation_config.json")
    add("--max-tokens", type=int, default=32768,
        help="of an answer. Reasoning needs room: a chain that is cut short hides what happens at "
        "the end of a long one, where a cache rank has most to lose")  # fmt: skip
    add("--no-thinking", action="store_true", help="tell the chat template enable_thinking=false")
    add("--prompt", type=Path, metavar="FILE", help="a prompt file of sgl-eval, instead of its own")
    add("--dense", action="store_true", help="ask a server with a cache rank to answer dense")

    compare = commands.add_parser("compare", help="compare two folders of runs by question")
    compare.add_argument("baseline", type=Path, help="--out of the dense system")
    compare.add_argument("system", type=Path, help="--out of the other system")
    compare.add_argument("--out", type=Path, help="folder of the report; default: SYSTEM")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    try:
        if options.command == "compare":
            report = compare_folders(options.baseline, options.system)
            text = markdown(report)
            files = write_report(options.out or options.system, "comparison", report, text)
            print(text, *files, sep="\n")
        else:
            command = command_line("benchmark", argv)
            for warning in run_benchmark(options, command).warnings:
                print(f"warning: {warning}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: pip install --editable '.[eval]'")
    return 0


if __name__ == "__main__":
    run(main)
