"""Serve with sparse decode; SGLang's flags and ours may be given.

python -m sglang_ext.launch --model-path MODEL [any SGLang flag]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext.model_path import require_model

if TYPE_CHECKING:
    from sglang_ext.server_args import CacheRankServerArgs

COMPLAINTS = (ValueError, OSError, AssertionError, ImportError)
"""Errors by which SGLang and we refuse arguments."""


def main(
    argv: Sequence[str],
    kind: type[CacheRankServerArgs] | None = None,
    run_scheduler_process: Callable[..., Any] | None = None,
) -> int:
    """Serve until stopped; the exit status, 2 if the arguments are refused."""
    try:
        _require_named_model(argv)
        with _without_collections():  # these import SGLang
            from sglang_ext.port import require_free
            from sglang_ext.server_args import CacheRankServerArgs, parse_server_args
        server_args = parse_server_args(argv, kind or CacheRankServerArgs)
        require_free(server_args.host, server_args.port)
    except COMPLAINTS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _serve(server_args, run_scheduler_process)
    return 0


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage: importing SGLang makes none, and looking for it takes a sixth of that."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _require_named_model(argv: Sequence[str]) -> None:
    """Check before SGLang is imported that there is the model which a command line names.

    Raises:
        FileNotFoundError: there is none.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", nargs="?")
    parser.add_argument("--revision", nargs="?")
    parser.add_argument("--cache-rank-gpus", nargs="?")
    named, _ = parser.parse_known_args(argv)
    if named.model_path is not None and named.cache_rank_gpus != "0":
        require_model(named.model_path, named.revision)


def _serve(
    server_args: CacheRankServerArgs, run_scheduler_process: Callable[..., Any] | None
) -> None:
    with _without_collections():  # imported here, so that a refusal does not wait for it
        from sglang.srt.entrypoints.http_server import app, launch_server

        from sglang_ext import processes, stopping
        from sglang_ext.requests.serving import answer_exceptions
    processes.load_plugin()
    answer_exceptions(app)
    stopping.stop_on_signals()
    try:
        launch_server(
            server_args,
            init_tokenizer_manager_func=stopping.init_tokenizer_manager,
            run_scheduler_process_func=run_scheduler_process or processes.run_scheduler_process,
            run_detokenizer_process_func=processes.run_detokenizer_process,
        )
    finally:
        stopping.end_processes()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
