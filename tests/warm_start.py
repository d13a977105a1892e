"""Starts servers as copies of a process that has imported SGLang: that is half of a start on CPUs.

    python -m tests.warm_start      starts what lines on its input ask for, and answers each

What is started runs as `python -m MODULE` does, in a session of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
)

READ_AT_IMPORT = {"SGLANG_TEST_RETRACT", "SGLANG_TEST_RETRACT_INTERVAL"}
"""SGLang reads these variables when it is imported: a copy would not heed them."""


def start(
    start_process: Callable[..., Any], command: list[str], log: Path, environment: dict[str, str]
) -> Any:
    """Start a copy, or, for what only a process of its own heeds, such a process."""
    is_copy = READ_AT_IMPORT.isdisjoint(environment)
    return (Process if is_copy else start_process)(command, log, environment)


class Process:
    """A process that is not this one's child, with what servers need of `subprocess.Popen`."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        """Run `python -m MODULE ARGUMENTS`.

        Args:
            log: what it writes to.
            environment: all of it.
        """
        log.write_bytes(b"")
        started = {"command": command[2:], "log": str(log), "environment": environment}
        self.pid = int(_ask(started | {"folder": os.getcwd()}))

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        status: int | None = _ask(self.pid)
        return status

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for the exit status.

        Raises:
            TimeoutExpired: it has none after so many seconds.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.05)
        return status


_lock = threading.Lock()


def _ask(question: Any) -> Any:
    with _lock:
        process = _warm_process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


@functools.cache
def _warm_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.warm_start"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        start_new_session=True,
    )


def main() -> None:
    """Answer until the input ends, and in each copy run what was asked for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    _import()
    statuses: dict[int, int] = {}

    def reap(*_: Any) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        question = json.loads(line)
        answer = statuses.get(question) if isinstance(question, int) else _fork()
        if answer == 0 and isinstance(question, dict):
            answers.close()
            return _become(**question)
        print(json.dumps(answer), file=answers, flush=True)


def _import() -> None:
    gc.disable()
    importlib.import_module("sglang_ext")  # lets SGLang be imported without a GPU
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _fork() -> int:
    """Fork, as `os.fork`; when this process goes on, the copy has a session of its own."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
    os.close(writer)
    if pid:
        os.read(reader, 1)  # nothing: the copy has closed its end
    os.close(reader)
    return pid


def _become(command: list[str], log: str, environment: dict[str, str], folder: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull) as nothing, open(log, "wb") as output:
        for file, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file.fileno(), number)
    sys.argv[1:] = command[1:]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
