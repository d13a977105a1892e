"""What the commands share that compare a language model's decoding with dense decoding."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.shared.command import explained
from scripts.shared.machine import visible_gpus
from scripts.shared.models import model_config
from scripts.shared.systems import DENSE, parse_assignments

SYSTEMS = (DENSE, "oracle", "quest", "window", "cache-rank")

POLICY: dict[str, Any] = {
    "sink_tokens": 4,
    "recent_tokens": 64,
    "dense_layers": 1,
    "hysteresis": 0,
    "query_window": 16,
    "recall_interval": 1,
    "bulk_chunk_tokens": 8192,
    "kv_residency": "bf16",
}
"""These are the arguments of sparse systems where neither a label nor the user says otherwise. All
that is selected may enter in one step, as it does in the baselines, and keys are as they came: what
a format loses is asked for by its name."""


def add_options(parser: argparse.ArgumentParser, budgets: tuple[int, ...]) -> None:
    """Add the options of both commands; `budgets` are the default."""
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the results")
    add("--model-path", "--model", dest="model", default="smollm2",
        help="a folder, or a model that fetch_model knows; default: %(default)s")  # fmt: skip
    add("--systems", nargs="+", default=list(SYSTEMS), metavar="LABEL",
        help="NAME or NAME:ARGUMENT=VALUE,...; default: %(default)s")  # fmt: skip
    add("--budgets", type=int, nargs="+", default=list(budgets), metavar="K",
        help="tokens that each KV head selects; default: %(default)s")  # fmt: skip
    add("--set", type=explained(parse_assignments), default={}, dest="settings",
        metavar="NAME=VALUE,...", help="server arguments of all sparse systems")  # fmt: skip
    add("--gpus", nargs="*", metavar="GPU",
        help="that servers may use; one listed twice takes two servers; default: all")  # fmt: skip
    add("--server-flags", type=explained(shlex.split), default=[],
        help="further flags of every server")  # fmt: skip
    add("--resume", action="store_true", help="run what is missing in --out")
    add("--render", action="store_true", help="only write tables and plots again")


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line, with POLICY and the machine where it says nothing; ends if wrong."""
    options = parser.parse_args(argv)
    options.settings = {**POLICY, **options.settings}
    if options.gpus is None:
        options.gpus = visible_gpus()
    if min(options.budgets) < 1:
        parser.error("--budgets must be at least 1")
    return options


def check_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End if there is no such model, unless nothing is to be run; for when the rest is right."""
    if options.render:
        return
    try:
        model_config(options.model)
    except ValueError as error:
        parser.error(f"--model-path: {error}")
