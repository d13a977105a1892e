"""Serve with a cache rank; SGLang's flags and ours may be given.

python -m sglang_ext.launch --cache-rank-gpus 1 [any SGLang flag]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Serve until stopped, and return the exit status: 2 if the arguments are refused."""
    from sglang_ext.refusals import refuse_used_port
    from sglang_ext.server_args import parse_server_args

    try:
        server_args = parse_server_args(argv)
        refuse_used_port(server_args.host, server_args.port)
    except (ValueError, OSError) as error:  # ours, and SGLang's own complaints about arguments
        print(f"error: {error}", file=sys.stderr)
        return 2

    # Imported here, so that a refusal does not wait for it.
    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.utils import kill_process_tree

    from sglang_ext import processes
    from sglang_ext.requests.serving import answer_exceptions

    processes.load_plugin()
    answer_exceptions(app)
    try:
        launch_server(
            server_args,
            run_scheduler_process_func=processes.run_scheduler_process,
            run_detokenizer_process_func=processes.run_detokenizer_process,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
