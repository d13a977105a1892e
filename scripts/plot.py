"""Draw what a running server measured.

    python -m scripts.plot recall --base-url http://127.0.0.1:30000 [--output results/recall]
    python -m scripts.plot recall --file server_info.json

`recall` draws the state that `/server_info` shows, of whatever model is served: recall, attention
mass and query cosine as maps of layers and heads, and the overlap of what queries select by the
distance between them (AsyncSpade Fig. 4). It writes PNG and SVG, and beside them `recall.json`,
which `--file` reads too. What the figures mean: docs/recall.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.recall import NothingMeasuredError, read_state, write_plots
from scripts.shared.command import make_parser


def main(arguments: Sequence[str]) -> int:
    """Draw; the exit status."""
    parser = make_parser("plot", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recall = commands.add_parser("recall", help="how good selections were, by layer and head")
    source = recall.add_mutually_exclusive_group(required=True)
    source.add_argument("--base-url", help="of a running server")
    source.add_argument("--file", type=Path, help="a saved /server_info, or a recall.json")
    recall.add_argument("--output", type=Path, default=Path("results/recall"), help="a folder")
    options = parser.parse_args(arguments)
    try:
        state = read_state(options.base_url, options.file)
    except NothingMeasuredError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in write_plots(state, options.output):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
