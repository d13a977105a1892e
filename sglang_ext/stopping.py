"""A server stops cleanly, whether a signal comes to its first process or to all of them.

After SIGTERM the server waits for the last request that runs, as SGLang does. After SIGINT, which
is Ctrl-C, requests have a few seconds to end and are then aborted, so that streams end with a
reason. A second signal aborts them at once. SGLang reports a crash after Ctrl-C in a terminal: its
schedulers get the signal as well.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from sglang.srt.entrypoints import engine, http_server
from sglang.srt.managers.tokenizer_manager import SignalHandler
from sglang.srt.utils import kill_process_tree

from sglang_ext import processes

SECONDS_TO_END = 2.0
"""Requests that run at SIGINT may end by themselves for so long."""

SECONDS_TO_ABORT = 3.0
"""A server that has aborted its requests waits so long for their streams to end."""


class Stopping(SignalHandler):
    """Stops the HTTP server of this process; SGLang makes one when the first request comes."""

    def __init__(self, manager: Any) -> None:
        """Take the signals over from the HTTP server."""
        super().__init__(manager)
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        handler = signal.getsignal(signal.SIGINT)
        self._exit: Callable[..., Any] | None = None
        if isinstance(getattr(handler, "__self__", None), uvicorn.Server):
            self._exit = handler  # type: ignore[assignment]
            self._loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
        """Take no more requests, and stop when none is left."""
        if self._exit is None:
            super().sigterm_handler(signum, frame)
        elif self._is_stopping:
            self._abort()
        else:
            self._is_stopping = True
            self._exit(signal.SIGINT, None)

    def _interrupt(self) -> None:
        if not self._is_stopping:
            self._loop.call_later(SECONDS_TO_END, self._abort)
        self.sigterm_handler()

    def _abort(self) -> None:
        assert self._exit is not None
        self.tokenizer_manager.abort_request(abort_all=True)
        # The second time it does not wait for streams.
        self._loop.call_later(SECONDS_TO_ABORT, self._exit, signal.SIGINT, None)


def init_tokenizer_manager(*args: Any, **kwargs: Any) -> Any:
    """Make SGLang's tokenizer manager, which is to stop in our way."""
    made = engine.init_tokenizer_manager(*args, **kwargs)
    made[0].signal_handler_class = Stopping
    return made


def stop_on_signals() -> None:
    """Stop at once while no HTTP server listens to signals: before it has started, and after it.

    An exception would not do. It is lost where it is raised in a callback, and the server goes on.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_at_once)


def _stop_at_once(signum: int, frame: Any) -> None:
    end_processes()
    atexit._run_exitfuncs()  # semaphores are files, which would stay
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_processes() -> None:
    """End the other processes of a server that has stopped; none of them has crashed."""
    processes.ignore_signals()
    state = http_server.get_global_state()
    if state is not None and (watchdog := state.tokenizer_manager._subprocess_watchdog) is not None:
        watchdog.stop()
    kill_process_tree(os.getpid(), include_parent=False)
