"""A command that runs servers is interrupted once, and then has the time to stop them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import time
    from scripts.shared.serving import SECONDS_OF_ONE_INTERRUPTION, stop_on_sigterm

    stop_on_sigterm()
    print("ready", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    try:
        time.sleep(SECONDS_OF_ONE_INTERRUPTION + 0.5)
        print("stopped", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted again", flush=True)
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_in_a_row_are_one_interruption_and_a_later_one_is_another(number: int) -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = iter(process.stdout.readline, "")
        assert next(said) == "ready\n"
        os.kill(process.pid, number)
        assert next(said) == "interrupted\n"
        os.kill(process.pid, number)
        assert next(said) == "stopped\n"
        os.kill(process.pid, number)
        assert next(said) == "interrupted again\n"
    assert process.returncode == 0
