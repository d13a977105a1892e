"""AIME, GPQA Diamond and MATH-500 on a running server, and a comparison of two servers.

    python -m scripts.benchmark run aime24 aime25 --base-url http://127.0.0.1:30000 --out dense
    python -m scripts.benchmark run gpqa --from-dataset gpqa.jsonl --base-url ... --out dense
    python -m scripts.benchmark compare dense cache-rank
    python -m scripts.benchmark questions math500 --out math500.jsonl  # for a machine without hub

Questions are asked and graded by sgl-eval, which `pip install --editable '.[eval]'` brings;
docs/evaluation.md says how to serve and how to read the result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.benchmarks.comparison import compare_folders, markdown, write_report
from scripts.accuracy.benchmarks.harness import Sampling, harness_version
from scripts.accuracy.benchmarks.questions import BENCHMARKS, digest, write_questions
from scripts.accuracy.benchmarks.runs import run_benchmarks
from scripts.shared.command import make_parser
from scripts.shared.serving import ServerError

_NAMES = ", ".join(BENCHMARKS)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("benchmark", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="ask a server all questions of benchmarks")
    add = run.add_argument
    add("benchmarks", nargs="+", choices=BENCHMARKS, metavar="BENCHMARK", help=_NAMES)
    add("--base-url", required=True, help="of the server, with or without /v1")
    add("--out", type=Path, required=True, help="folder of this system; its name is the system's")
    add("--from-dataset", type=Path, metavar="FILE", help="questions, one JSON object a line")
    add("--num-examples", type=int, help="ask the first questions only")
    repeats = "answers to each question; default: 16 AIME, 8 GPQA, 4 MATH-500"
    add("--n-repeats", type=int, help=repeats)
    add("--temperature", type=float, default=Sampling.temperature)
    add("--top-p", type=float, default=Sampling.top_p)
    add("--top-k", type=int, help="default: the server's, from the model's generation_config.json")
    add("--max-tokens", type=int, default=Sampling.max_tokens, help="of an answer")
    add("--no-thinking", action="store_true", help="tell the chat template enable_thinking=false")
    add("--prompt", type=Path, metavar="FILE", help="a prompt file of sgl-eval, instead of its own")
    add("--num-threads", type=int, help="requests at a time; default: 64, or what fits")
    add("--dense", action="store_true", help="ask a server with a cache rank to answer dense")

    compare = commands.add_parser("compare", help="compare two folders of runs by question")
    compare.add_argument("baseline", type=Path, help="--out of the dense system")
    compare.add_argument("system", type=Path, help="--out of the other system")
    compare.add_argument("--out", type=Path, help="folder of the report; default: SYSTEM")

    questions = commands.add_parser("questions", help="write the questions of a benchmark")
    questions.add_argument("benchmark", choices=BENCHMARKS, metavar="BENCHMARK", help=_NAMES)
    questions.add_argument("--out", type=Path, required=True, metavar="FILE")

    options = parser.parse_args(argv)
    if options.command == "run" and options.from_dataset and len(options.benchmarks) > 1:
        parser.error("--from-dataset is of one benchmark")
    return options


def main(argv: Sequence[str]) -> int:
    """Run; the exit status."""
    options = parse_options(argv)
    try:
        if options.command == "compare":
            report = compare_folders(options.baseline, options.system)
            print(markdown(report))
            for file in write_report(report, options.out or options.system):
                print(file, file=sys.stderr)
            return 0
        harness_version()
        if options.command == "run":
            run_benchmarks(options, ["python", "-m", "scripts.benchmark", *argv])
        else:
            questions = BENCHMARKS[options.benchmark].load()
            write_questions(questions, options.out)
            print(f"{options.out}: {len(questions)} questions, sha256 {digest(options.out)}")
    except InterruptedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 130
    except (OSError, ValueError, ServerError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
