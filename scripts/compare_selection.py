"""Compare query predictors by what they select, and hysteresis by what it ships.

    python -m scripts.compare_selection [--recording FOLDER]
    python -m scripts.compare_selection [--budget 40] [--chains 4]

Replays every query, key and value that reached a cache rank through each predictor, and through
several margins: those that a server with CACHE_RANK_RECORD=FOLDER recorded, or else those of the
bundled model, which is served once. The true query of a step scores the selection that was made for
it: recall of the exact top tokens, and the attention probability captured. The bundled model
restates each key, so its queries repeat: read the order of the rows, not their height. The last
line is one JSON object.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.accuracy.selection import base_config, compare_margins, compare_predictors, record
from scripts.shared.command import make_parser, run
from scripts.shared.recordings import read_recording


@torch.no_grad()
def main(argv: Sequence[str]) -> int:
    """Record, replay, print; the exit status."""
    parser = make_parser("compare_selection", __doc__)
    parser.add_argument("--recording", type=Path, metavar="FOLDER", help="replay what it holds")
    parser.add_argument("--budget", type=int, default=40, help="of the bundled model, as --chains")
    parser.add_argument("--chains", type=int, default=4)
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if not options.recording:
                record(options.budget, options.chains, Path(folder))
            config, sequences = read_recording(options.recording or Path(folder))
        base = base_config(config)
        predictors, table = compare_predictors(base, sequences)
        print(f"Selection by predictor, k = {base.sparse_budget}, no margin\n\n{table}\n")
        margins, table = compare_margins(base, sequences)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Hysteresis, predictor {base.query_predictor}\n\n{table}\n")
    results = {"machine": platform.platform(), "predictors": predictors, "margins": margins}
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    run(main)
