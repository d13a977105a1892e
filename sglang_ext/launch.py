"""Serve with a cache rank; SGLang's flags and ours may be given.

python -m sglang_ext.launch --cache-rank-gpus 1 [any SGLang flag]
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_ext.server_args import CacheRankServerArgs

COMPLAINTS = (ValueError, OSError, AssertionError, ImportError)
"""Errors by which SGLang and we refuse arguments."""


def main(argv: Sequence[str]) -> int:
    """Serve until stopped, and return the exit status: 2 if the arguments are refused."""
    from sglang_ext.port import reserved
    from sglang_ext.server_args import parse_server_args

    with contextlib.ExitStack() as held:
        try:
            server_args = parse_server_args(argv)
            held.enter_context(reserved(server_args.host, server_args.port))
        except COMPLAINTS as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        _serve(server_args)
    return 0


def _serve(server_args: CacheRankServerArgs) -> None:
    # Imported here, so that a refusal does not wait for it.
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.utils import kill_process_tree

    from sglang_ext import processes

    processes.load_plugin()
    try:
        launch_server(
            server_args,
            run_scheduler_process_func=processes.run_scheduler_process,
            run_detokenizer_process_func=processes.run_detokenizer_process,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
