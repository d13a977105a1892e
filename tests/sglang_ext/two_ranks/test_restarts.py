"""How a process ended, what is said of it, and when the next one starts."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from sglang_ext.two_ranks.exchange.connection import ProcessSettings
from sglang_ext.two_ranks.exchange.spawned_process import LAST_WORDS_CHARACTERS, SpawnedProcess
from sglang_ext.two_ranks.restart_backoff import STABLE_SECONDS, RestartBackoff
from sglang_ext.two_ranks.supervisor import Supervisor

LONG = 60.0


def spawned(program: str) -> SpawnedProcess:
    return SpawnedProcess([sys.executable, "-c", program], b"launch", os.environ)


def test_three_restarts_are_prompt_and_the_next_ones_double() -> None:
    backoff = RestartBackoff(longest=5.0)
    assert [backoff.after(0.0) for _ in range(7)] == [0, 0, 0, 1, 2, 4, 5]
    assert [backoff.after(STABLE_SECONDS) for _ in range(2)] == [0, 0]
    assert [backoff.after(STABLE_SECONDS - 1) for _ in range(3)] == [0, 0, 1]


def test_a_process_that_exits_leaves_its_status_and_its_last_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    process = spawned(f"import sys; sys.exit('first\\n' + 'x' * {2 * LAST_WORDS_CHARACTERS})")
    assert process.how_it_ended() == "exit status 1"
    assert process.last_words() == "x" * LAST_WORDS_CHARACTERS
    process.close_pipes()
    assert "first" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_of_others_is_told_from_ours(number: signal.Signals) -> None:
    process = spawned("import time; time.sleep(60)")
    os.kill(process.pid, number)
    process.end(LONG)
    process.end()
    assert process.how_it_ended() == f"killed by {number.name}"
    process.close_pipes()


def test_a_process_that_does_not_end_is_killed_by_us() -> None:
    process = spawned("import time; time.sleep(60)")
    process.end()
    assert process.how_it_ended() == "killed by this server"
    process.close_pipes()


def test_starts_that_fail_after_the_first_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(SpawnedProcess):
        def __init__(self, command: list[str], *rest: object) -> None:
            program = "import sys; sys.exit('no memory on this device')"
            super().__init__([command[0], "-c", program], *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("sglang_ext.two_ranks.exchange.connection.SpawnedProcess", Failing)
    supervisor = Supervisor("a cache rank", ProcessSettings("127.0.0.1"), LONG)
    supervisor.starts = 1
    supervisor._config = object()  # type: ignore[assignment]
    supervisor._may_open.set()
    stop = time.monotonic() + LONG
    while supervisor.failed_starts < 4 and time.monotonic() < stop:
        time.sleep(0.02)
    supervisor.close()
    assert supervisor.losses == 0
    lines = [line for line in caplog.messages if "did not start: exit status 1" in line]
    assert [line.rsplit(" comes ")[1] for line in lines[:4]] == ["at once"] * 3 + ["in 1 s"]
    assert all("'no memory on this device'" in line for line in lines)
