"""Sessions are ended whole."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from scripts.shared.machine import kill_session


def test_processes_that_outlive_their_leader_end_with_its_session() -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        leader.wait()
        os.kill(child, 0)
        kill_session(leader.pid, wait_seconds=10)
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
