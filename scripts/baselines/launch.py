"""Serve a baseline in place of a cache rank, drafts that select in another way, or a rounded cache.

python -m scripts.baselines.launch --decode-mode quest --sparse-budget 2048 [any SGLang flag]
python -m scripts.baselines.launch --draft-selector quest --speculative-algorithm CACHE_RANK [...]
python -m scripts.baselines.launch --round-kv fp8_e4m3 [...]    # on a CPU
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from scripts.baselines import plugin
from sglang_ext.launch import main


def serve(argv: Sequence[str]) -> int:
    """Serve until stopped; the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--draft-selector")
    parser.add_argument("--round-kv", choices=("fp8_e4m3",))
    own, others = parser.parse_known_args(argv)
    if own.draft_selector is not None:
        from scripts.baselines import drafting

        run = functools.partial(drafting.run_scheduler_process, own.draft_selector)
        return main(others, run_scheduler_process=run)

    if own.round_kv is not None:
        run = functools.partial(plugin.run_rounding_scheduler_process, own.round_kv)
        return main(others, run_scheduler_process=run)

    plugin.register()
    return main(others, plugin.BaselineServerArgs, plugin.run_scheduler_process)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
