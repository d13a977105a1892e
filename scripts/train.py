"""Train a model of the evaluation, export it, grade the export and write its card.

The result is a Hugging Face directory that SGLang serves like any Qwen3 checkpoint. The recipes are
in scripts/accuracy/training/recipes.py; small models take minutes on two CPU cores, those of 1024
facts take a GPU. With `--minutes` training ends in time, whatever it has reached by then; without
it, when the steps of the recipe are done. About once a minute the export is written as it stands.

Usage:

    python -m scripts.train --recipe pointer-chase-128 --output sglang_ext/bundled_model
    python -m scripts.train --recipe pointer-chase-1024 --minutes 8 --output results/chase
    python -m scripts.train --recipe self-written-1024 --from results/chase --output results/written

The last line on stdout is the result of the grading as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from scripts.accuracy.training.accuracy import grade_export
from scripts.accuracy.training.card import Making, write_card
from scripts.accuracy.training.export import export
from scripts.accuracy.training.loop import Training
from scripts.accuracy.training.model import load_model, make_model
from scripts.accuracy.training.recipes import RECIPES, Recipe
from scripts.accuracy.training.tokenizer import make_tokenizer


def train(args: argparse.Namespace, recipe: Recipe) -> None:
    """Train and export."""
    sizes = recipe.sizes
    tokenizer = make_tokenizer(recipe.words, sizes.max_position_embeddings)
    if recipe.starts_from:
        model = load_model(args.start, sizes, tokenizer, args.seed)
    else:
        model = make_model(sizes, recipe.rope_theta, tokenizer, args.seed)
    model.to(args.device)
    dtype = getattr(torch, recipe.dtypes[0])

    on_gpu = model.device.type == "cuda"
    began = time.monotonic()

    def checkpoint() -> None:
        export(model, tokenizer, args.output, dtype)
        Making(
            command=shlex.join(["python", "-m", "scripts.train", *sys.argv[1:]]),
            device=torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
            precision="bfloat16 with float32 weights" if on_gpu else "float32",
            parameters=model.num_parameters(),
            steps=training.steps,
            tokens=training.tokens,
            minutes=round((time.monotonic() - began) / 60, 1),
            seed=args.seed,
        ).save(args.output)

    seconds = None if args.minutes is None else 60 * args.minutes
    training = Training(model, recipe, tokenizer.get_vocab(), args.seed, seconds, checkpoint)
    training.run()
    checkpoint()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train, export and grade a model of the evaluation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--recipe", choices=RECIPES, required=True, help="what to train")
    parser.add_argument("--output", type=Path, required=True, help="directory of the export")
    parser.add_argument(
        "--from", type=Path, dest="start", metavar="DIR", help="model to train further"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the training data")
    parser.add_argument("--minutes", type=float, help="of training; else the recipe's steps")
    parser.add_argument("--learning-rate", type=float, help="peak; else the recipe's")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="to train and grade on"
    )
    parser.add_argument("--chains", type=int, help="problems to grade; else the recipe's")
    parser.add_argument(
        "--grade-only", action="store_true", help="grade what is in --output, and write its card"
    )
    parser.add_argument("--skip-grading", action="store_true", help="write no card")
    args = parser.parse_args()
    if RECIPES[args.recipe].starts_from and not (args.start or args.grade_only):
        parser.error(f"--recipe {args.recipe} needs --from: {RECIPES[args.recipe].starts_from}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    """Train unless told not to, then grade the export unless told not to."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    recipe = RECIPES[args.recipe]
    if args.learning_rate:
        recipe = replace(recipe, learning_rate=args.learning_rate)
    with logging_redirect_tqdm():
        if not args.grade_only:
            train(args, recipe)
    if args.skip_grading:
        return
    problems = [recipe.problem(seed) for seed in range(args.chains or recipe.chains)]
    results = [grade_export(args.output, problems, d, args.device) for d in recipe.dtypes]
    if (args.output / Making.FILE).exists():
        write_card(args.output, args.recipe, recipe, results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
