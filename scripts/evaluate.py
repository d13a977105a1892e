"""Measure the accuracy of several ways to decode, on tasks whose every step is checked.

    python -m scripts.evaluate --preset budgets --out results/budgets
    python -m scripts.evaluate --preset jumps | predictors | residency | lengths --out ...
    python -m scripts.evaluate --model DIR --dials facts=1024,hops=1000,keys=1024 \
        --systems dense window quest cache-rank --budgets 16 64 256 --gpus 0 1 --out ...
    python -m scripts.evaluate --base-url URL --systems cache-rank --budgets 64 --out ...
    python -m scripts.evaluate --render --out results/budgets      # tables and plots again

Serves each system in turn and sends it all problems at once. Problems have seeds 0, 1, ..., the
same for every system. Writes outcomes.jsonl as results come, which `--resume` goes on from, then
results.json, results.md and plots.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.evaluation import evaluate
from scripts.accuracy.presets import PRESETS
from scripts.accuracy.settings import POLICY
from scripts.accuracy.tasks import TASKS
from scripts.shared.command import explained, make_parser
from scripts.shared.machine import visible_gpus
from scripts.shared.models import find_config, folder_of
from scripts.shared.serving import stop_on_sigterm
from scripts.shared.systems import parse_assignments


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with what the preset says where nothing is given."""
    parser = make_parser("evaluate", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the results")
    presets = "; ".join(f"{name}: {preset.question}" for name, preset in PRESETS.items())
    add("--preset", choices=list(PRESETS), default="budgets", help=presets)
    folders = "a folder, or the name of one in scripts/accuracy/models; default: the preset's"
    add("--model", help=folders)
    add("--task", choices=list(TASKS), help="default: what the model is trained for")
    assignments = explained(parse_assignments)
    add("--dials", type=assignments, nargs="+", metavar="NAME=VALUE,...", help="one cell each")
    add("--systems", nargs="+", metavar="LABEL", help="NAME or NAME:ARGUMENT=VALUE,...")
    add("--budgets", type=int, nargs="+", metavar="K", help="of systems that name none")
    policy = ",".join(f"{name}={value}" for name, value in POLICY.items())
    add("--set", type=assignments, default={}, dest="settings", metavar="NAME=VALUE,...",
        help=f"server arguments of all sparse systems; default: {policy}")  # fmt: skip
    add("--chains", type=int, default=64, help="problems of a cell; default: %(default)s")
    add("--concurrency", type=int, default=64, help="requests at once; default: %(default)s")
    add("--gpus", nargs="*", metavar="GPU",
        help="that servers may use; one listed twice takes two servers; default: all")  # fmt: skip
    add("--server-flags", type=explained(shlex.split), default=[],
        help="further flags of every server")  # fmt: skip
    add("--base-url", help="a server that runs already; takes one system, as a name")
    add("--resume", action="store_true", help="run what is missing in --out")
    add("--render", action="store_true", help="only write tables and plots again")
    options = parser.parse_args(argv)
    preset = PRESETS[options.preset]
    options.model = options.model or preset.model
    try:
        name = folder_of(options.model).name
    except ValueError as error:
        parser.error(f"--model {error}")
    if name != folder_of(preset.model).name and not (options.task or options.dials):
        # Recipes import transformers, which only this needs.
        from scripts.accuracy.training.recipes import RECIPES

        if recipe := RECIPES.get(name):  # which trained the model
            options.task, options.dials = recipe.task, [recipe.dials]
    if not options.base_url and find_config(options.model) is None:
        parser.error(f"--model {options.model}: has no config.json")
    if options.task is None:
        options.task = preset.task
    elif options.task != preset.task:
        options.dials = options.dials or [{}]
    for part in ("dials", "systems", "budgets"):
        if getattr(options, part) is None:
            setattr(options, part, list(getattr(preset, part)))
    options.settings = {**POLICY, **options.settings}
    if options.gpus is None:
        options.gpus = visible_gpus()
    if options.chains < 2:
        parser.error("--chains must be at least 2: an interval needs several problems")
    if options.base_url and len(options.systems) * len(options.budgets) > 1:
        parser.error("--base-url serves one system: name one in --systems, with one of --budgets")
    return options


def main(argv: Sequence[str]) -> int:
    """Evaluate; the exit status."""
    options = parse_options(argv)
    try:
        run, files = evaluate(options, argv)
    except (TypeError, ValueError) as error:
        sys.exit(f"error: {error}")
    for path in files:
        print(path)
    return 1 if run.failures else 0


if __name__ == "__main__":
    stop_on_sigterm()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("interrupted; what was answered is kept, for --resume")
