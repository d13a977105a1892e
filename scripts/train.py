"""Train a model of the evaluation, export it, grade the export and write its card.

The result is a Hugging Face directory that SGLang serves like any Qwen3 checkpoint. The recipes are
in scripts/accuracy/training/recipes.py; small models take minutes on two CPU cores, those of 1024
facts take a GPU. With `--minutes` training ends in time, whatever it has reached by then; without
it, when the steps of the recipe are done. About once a minute the export is written as it stands.

    python -m scripts.train --recipe pointer-chase-128 --output sglang_ext/bundled_model
    python -m scripts.train --recipe pointer-chase-1024 --minutes 8 --output results/chase
    python -m scripts.train --recipe self-written-1024 --from results/chase --output results/written

The last line on stdout is the result of the grading as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from scripts.accuracy.training.grading import Making, grade_export, write_card
from scripts.accuracy.training.loop import train_and_export
from scripts.accuracy.training.recipes import RECIPES
from scripts.shared.command import make_parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("train", __doc__)
    add = parser.add_argument
    add("--recipe", choices=RECIPES, required=True, help="what to train")
    add("--output", type=Path, required=True, help="directory of the export")
    add("--from", type=Path, dest="start", metavar="DIR", help="model to train further")
    add("--seed", type=int, default=0, help="of the weights and the training data")
    add("--minutes", type=float, help="of training; else the recipe's steps")
    add("--learning-rate", type=float, help="peak; else the recipe's")
    devices = ["auto", "cpu", "cuda"]
    add("--device", choices=devices, default="auto", help="to train and grade on")
    add("--chains", type=int, help="problems to grade; else the recipe's")
    add("--grade-only", action="store_true", help="grade what is in --output, and write its card")
    add("--skip-grading", action="store_true", help="write no card")
    args = parser.parse_args(argv)
    if RECIPES[args.recipe].starts_from and not (args.start or args.grade_only):
        parser.error(f"--recipe {args.recipe} needs --from: {RECIPES[args.recipe].starts_from}")
    option, model = ("--output", args.output) if args.grade_only else ("--from", args.start)
    if model and not (model / "config.json").is_file():
        parser.error(f"{option} {model}: has no config.json")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def train(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Train unless told not to, then grade the export unless told not to.

    Raises:
        OSError: a model cannot be read or written.
        ValueError: the model to train further has other sizes or words.
    """
    recipe = RECIPES[args.recipe]
    if args.learning_rate:
        recipe = replace(recipe, learning_rate=args.learning_rate)
    with logging_redirect_tqdm():
        if not args.grade_only:
            start = args.start if recipe.starts_from else None
            command = shlex.join(["python", "-m", "scripts.train", *argv])
            train_and_export(
                recipe, args.output, start, args.seed, args.minutes, args.device, command
            )
    if args.skip_grading:
        return
    problems = [recipe.problem(seed) for seed in range(args.chains or recipe.chains)]
    results = [grade_export(args.output, problems, d, args.device) for d in recipe.dtypes]
    if (args.output / Making.FILE).exists():
        write_card(args.output, args.recipe, recipe, results)
    print(json.dumps(results))


def main(argv: Sequence[str]) -> int:
    """Train, grade, or both; the exit status."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        train(args, argv)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
