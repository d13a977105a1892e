"""Measure the accuracy of several ways to decode, on chains whose every step is checked.

    python -m scripts.evaluate --out results/budgets
    python -m scripts.evaluate --systems dense quest cache-rank --budgets 16 64 --out ...
    python -m scripts.evaluate --systems dense cache-rank:kv_residency=hack --out ...
    python -m scripts.evaluate --base-url URL --systems dense cache-rank --budgets 64 --out ...

Serves the bundled model in each system in turn and sends it all chains at once: walks through a
table of facts, of which each hop needs exactly one token (scripts/accuracy/pointer_chase.py).
Chains have seeds 0, 1, ..., the same for every system. Writes results.json and results.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import requests

from scripts.accuracy.evaluation import evaluate
from scripts.shared.command import make_parser, run
from scripts.shared.comparison import add_options, read_options
from scripts.shared.models import BUNDLED
from scripts.shared.systems import CACHE_RANK, DECODE_MODES, DENSE, INLINE

SETTINGS: dict[str, Any] = {
    "sink_tokens": 4,
    "recent_tokens": 16,
    "hysteresis": 8,
    "kv_residency": "bf16",
}
"""The bundled model attends to few tokens. Keys are as they came: what a format loses is asked for
by its name."""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = make_parser("evaluate", __doc__)
    add_options(parser, BUNDLED, (DENSE, *DECODE_MODES, INLINE, CACHE_RANK), (16, 32, 64), SETTINGS)
    add = parser.add_argument
    add("--facts", type=int, default=128, help="of a chain's table; default: %(default)s")
    add("--hops", type=int, default=80, help="of a chain; default: %(default)s")
    add("--chains", type=int, default=64, help="default: %(default)s")
    add("--concurrency", type=int, default=64, help="requests at once; default: %(default)s")
    add("--base-url", help="a server that runs already: dense decoding, and one system's name")
    options = read_options(parser, argv, SETTINGS)
    if options.chains < 2:
        parser.error("--chains must be at least 2: an interval needs several chains")
    if options.base_url and len(set(options.systems) - {DENSE}) * len(options.budgets) > 1:
        parser.error("--base-url serves one system: name one beside dense, with one of --budgets")
    return options


def main(argv: Sequence[str]) -> int:
    """Evaluate; the exit status."""
    options = parse_options(argv)
    try:
        found, files = evaluate(options, argv)
    except (requests.RequestException, ValueError) as error:
        sys.exit(f"error: {error}")
    for path in files:
        print(path)
    return 1 if found.run.failures else 0


if __name__ == "__main__":
    run(main)
