"""Compare query predictors by what they select, and hysteresis by what it ships.

    python -m scripts.compare_selection [--budget 40] [--chains 4]

Serves the bundled model once and records every query, key and value that reaches the cache rank;
then replays the record through each predictor, and through several margins. The true
query of a step scores the selection that was made for it: recall of the exact top tokens, and the
attention probability captured. The bundled model restates each key, so its queries repeat: read the
order of the rows, not their height. The last line is one JSON object.
"""

from __future__ import annotations

import json
import platform

import torch

from scripts.accuracy.selection import (
    base_config,
    compare_margins,
    compare_predictors,
    recorded_events,
)
from scripts.shared.command import make_parser
from scripts.shared.serving import stop_on_sigterm


def main() -> None:
    """Record, replay, print."""
    parser = make_parser("compare_selection", __doc__)
    parser.add_argument("--budget", type=int, default=40)
    parser.add_argument("--chains", type=int, default=4)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    stop_on_sigterm()
    events = recorded_events(options.budget, options.chains)
    base = base_config(events)
    predictors, text = compare_predictors(base, events)
    print(f"Selection by predictor, k = {options.budget}, no margin\n\n{text}\n")
    margins, text = compare_margins(base, events)
    print(f"Hysteresis, predictor {base.query_predictor}\n\n{text}\n")
    results = {"machine": platform.platform(), "predictors": predictors, "margins": margins}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
