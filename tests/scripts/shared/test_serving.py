"""A command that runs servers is interrupted once, and then has the time to stop them."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import signal, sys, time
    from scripts.shared.serving import SECONDS_OF_ONE_INTERRUPTION, stop_on_sigterm

    def interrupts(seconds: float) -> bool:
        try:
            time.sleep(seconds)
            signal.raise_signal(int(sys.argv[1]))
        except KeyboardInterrupt:
            return True
        return False

    stop_on_sigterm()
    print([interrupts(0), interrupts(0), interrupts(SECONDS_OF_ONE_INTERRUPTION + 0.5)])
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_in_a_row_are_one_interruption_and_a_later_one_is_another(number: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(int(number))]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert said.stdout == "[True, False, True]\n"
