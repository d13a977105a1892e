"""Serve the bundled model, ask it a question twice, and show what the cache rank did.

    make demo

The question is a table of 128 facts and a walk through them: 80 hops, each of which needs exactly
one token of the table, so the program can check every word. It is asked once with dense attention
and once with a working set of a tenth of the context.
"""

from __future__ import annotations

import sys

from scripts.accuracy.demonstration import demonstrate
from scripts.shared.serving import stop_on_sigterm

if __name__ == "__main__":
    stop_on_sigterm()
    try:
        demonstrate()
    except KeyboardInterrupt:
        sys.exit("interrupted")
