"""A child process that leaves behind how it ended and what it said last."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

LAST_WORDS_CHARACTERS = 300
DYING_SECONDS = 0.25
"""A process that is dying by itself has this time to do so, so that its own end is seen."""

_STDERR = 2
_LINE_BYTES = 1 << 16
_TEE_SECONDS = 0.5
"""What a process has written arrives within this time of its end."""


class SpawnedProcess(subprocess.Popen[bytes]):
    """A process with pipes to its input and output, whose standard error is passed on to ours."""

    def __init__(
        self, command: Sequence[str], first_line: bytes, environment: Mapping[str, str]
    ) -> None:
        """Start the process, and write a line to its input."""
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        self._spawned = time.monotonic()
        self._last_line = b""
        self._was_killed = False
        self._tee = threading.Thread(target=self._pass_on, name=f"stderr-{self.pid}", daemon=True)
        self._tee.start()
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; who waits for it will notice
            self.stdin.write(first_line + b"\n")
            self.stdin.flush()

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._spawned

    def end(self, patience: float = DYING_SECONDS) -> None:
        """Kill it, unless it ends by itself in so many seconds. Safe from any thread, and twice."""
        try:
            self.wait(patience)
        except subprocess.TimeoutExpired:
            self._was_killed = True
            self.kill()

    def how_it_ended(self) -> str:
        """Say by which status or signal it ended; it has ended, or is about to."""
        status = self.wait()
        if status >= 0:
            return f"exit status {status}"
        if self._was_killed and status == -signal.SIGKILL:
            return "killed by this server"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {-status}"

    def last_words(self) -> str:
        """Return the last line of its standard error, shortened; it has ended."""
        self._tee.join(_TEE_SECONDS)
        return self._last_line.decode(errors="replace").strip()[:LAST_WORDS_CHARACTERS]

    def close_pipes(self) -> None:
        """Close our ends of its pipes; it has ended."""
        self._tee.join(_TEE_SECONDS)
        for pipe in (self.stdin, self.stdout, self.stderr):
            # A child of its own may hold its standard error open, which the thread goes on reading.
            if pipe is not None and not (pipe is self.stderr and self._tee.is_alive()):
                with contextlib.suppress(BrokenPipeError):  # what it has not read is flushed
                    pipe.close()

    def _pass_on(self) -> None:
        assert self.stderr is not None
        while line := self.stderr.readline(_LINE_BYTES):
            if line.strip():
                self._last_line = line
            with contextlib.suppress(OSError):  # ours may be closed; it must not block for that
                os.write(_STDERR, line)
