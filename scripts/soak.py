"""Use a server for a while, disturb it at random, and check every answer.

    python -m scripts.soak --seconds 1800
    python -m scripts.soak --seconds 600 --streams 16 --modes working-set
    python -m scripts.soak --disturbances kill stall -- --cache-rank-mem-fraction 0.2

Serves the bundled model, on GPUs where there are two, with the flags behind `--`. Tokens are
selected by a cache rank, with either --inference-kv, and in the server's own process. Several
streams of requests walk through tables of facts, so that every token has one right value. Meanwhile
the cache rank is killed, stopped and delayed, requests are aborted, generation is paused, caches
are flushed and weights are loaded again. At the end the pools have to be whole, the memory of both
ranks flat, and no file left behind. Prints one line a mode; the status is 1 if anything was wrong.
One that is interrupted ends what is under way, and says what it has seen. No other server may start
or end on the machine meanwhile: its files in /dev/shm would count as left behind.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from scripts.accuracy.demonstration import environment
from scripts.operations.disturbances import DISTURBANCES
from scripts.operations.soak import CACHE_RANK, Setting, soak
from scripts.shared.command import make_parser, run

INLINE = "inline"
MODES = ("full", "working-set", INLINE)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; ends if it is wrong."""
    parser = make_parser("soak", __doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=120, help="in all, start-up apart; default: 120")
    add("--streams", type=int, default=8, help="requests at once; default: 8")
    add("--requests", type=int, default=100_000, help="after so many a mode ends early")
    add("--modes", nargs="+", choices=MODES, default=list(MODES),
        help="--inference-kv of a cache rank, or none; default: one after the other")  # fmt: skip
    add("--seed", type=int, default=0, help="of prompts and disturbances; default: 0")
    add("--disturbances", nargs="+", choices=list(DISTURBANCES), default=list(DISTURBANCES),
        help="those that come, drawn by their weights; default: all")  # fmt: skip
    add("flags", nargs="*", help="flags of the server, behind --")
    options = parser.parse_args(argv)
    if options.seconds <= 0 or options.streams < 1 or options.requests < 1:
        parser.error("--seconds, --streams and --requests: must be above 0")
    return options


def main(argv: Sequence[str]) -> int:
    """Soak a server in each mode; returns the exit status."""
    options = parse_options(argv)
    console = Console()
    failed = False
    for mode in options.modes:
        arguments, disturbances = options.flags, options.disturbances
        if mode == INLINE:
            disturbances = [one for one in disturbances if not DISTURBANCES[one].of_cache_rank]
        else:
            most = ["--max-sparse-requests", str(options.streams)]
            arguments = [*CACHE_RANK, "--inference-kv", mode, *most, *arguments]
        setting = Setting(
            options.seconds / len(options.modes),
            options.streams,
            options.requests,
            options.seed,
            disturbances,
        )
        with console.status(f"{mode}: starting") as status:
            verdict = soak(arguments, environment(), setting, status.update)
        console.print(f"{mode}: {verdict}", soft_wrap=True, highlight=False)
        for mistake in verdict.mistakes:
            console.print(f"  {mistake}", soft_wrap=True, highlight=False, markup=False)
        failed |= verdict.result != "PASSED"
        if verdict.interrupted:
            break
    return int(failed)


if __name__ == "__main__":
    run(main)
