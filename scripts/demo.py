"""Serve the bundled model, ask it a question twice, and show what the cache rank did.

    make demo

The question is a table of 128 facts and a walk through them: 80 hops, each of which needs exactly
one token of the table, so the program can check every word. It is asked once with dense attention
and once with a working set of a tenth of the context.
"""

from __future__ import annotations

from collections.abc import Sequence

from scripts.accuracy.demonstration import demonstrate
from scripts.shared.command import make_parser, run


def main(argv: Sequence[str]) -> int:
    """Demonstrate; the exit status."""
    make_parser("demo", __doc__).parse_args(argv)
    demonstrate()
    return 0


if __name__ == "__main__":
    run(main)
