"""`sglang serve MODEL --model-type cache-rank …`, which SGLang 0.5.23 has."""

from __future__ import annotations

import sys
from typing import Any


def create() -> Any:
    """Make the backend of SGLang's entry-point group `sglang.serve_backends`."""
    from sglang.cli.serve_backends import SERVE_BACKEND_API_VERSION, ServeBackend

    # Without a model, the bundled one is served.
    return ServeBackend(SERVE_BACKEND_API_VERSION, run=_run, requires_model_path=False)


def _run(request: Any) -> None:
    """Serve until stopped, as python -m sglang_ext.launch does with the rest of the command."""
    from sglang_ext import launch

    status = launch.main(request.argv)
    if status:
        sys.exit(status)
