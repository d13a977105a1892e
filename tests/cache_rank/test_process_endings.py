"""How a real cache-rank process ends, is lost and is replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from small_models import GQA, small_config
from waiting import wait_until
from wired_rank import LONG, SETTINGS, InferenceRank

from cache_rank.channels.transport import TransportError
from cache_rank.protocol import Report, Row, Step
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError, Connection
from sglang_ext.two_ranks.supervisor import Supervisor


def test_the_process_exits_when_its_standard_input_closes() -> None:
    config = small_config(GQA)
    connection = Connection("cache rank of a test", SETTINGS, LONG)
    try:
        connection.open(config)
        connection.control.send(Step(1, [Row(1, 1)]))  # it waits for tensors
        time.sleep(0.2)
        process = connection.process
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0
    finally:
        connection.close()


def test_a_process_that_beats_but_handles_nothing_more_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_ext.two_ranks.exchange.connection.BUSY_SECONDS", 1.0)
    with closing(Connection("cache rank of a test", SETTINGS, LONG)) as connection:
        connection.open(small_config(GQA))
        reports: list[Report] = []
        connection.control.send(Step(1, [Row(1, 1)]))  # it waits for tensors
        with pytest.raises(CacheRankDownError, match="has been stuck for 1 s"):
            connection.watch(reports.append)
        assert connection.process.poll() is None


SILENCE_SECONDS = 5.0


@pytest.fixture(scope="module")
def fragile() -> Iterator[InferenceRank]:
    """A rank whose cache rank is ended by tests, and starts again."""
    with closing(InferenceRank(small_config(GQA), timeout=SILENCE_SECONDS)) as rank:
        yield rank


@pytest.mark.xdist_group("fragile cache rank")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
def test_a_lost_process_is_withdrawn_and_replaced(
    fragile: InferenceRank, ending: signal.Signals
) -> None:
    supervisor, lost, starts = fragile.supervisor, fragile.connection, fragile.supervisor.starts
    request = fragile.arrive(prompt=20)
    fragile.decode([request])
    downs = fragile.reports.downs
    answer = lost.link.down.receive(torch.zeros(100, dtype=torch.uint8))

    os.kill(lost.process.pid, ending)
    began = time.monotonic()
    wait_until(lambda: supervisor.connection is not lost, SILENCE_SECONDS + LONG)
    with pytest.raises(TransportError):
        answer.wait(LONG)
    assert time.monotonic() - began < SILENCE_SECONDS + LONG

    wait_until(lambda: supervisor.starts == starts + 1, LONG)
    assert fragile.reports.downs == downs + 1
    assert supervisor.connection is not None
    assert supervisor.connection.process.pid != lost.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(lost.process.pid, 0)  # reaped

    last_loss = supervisor.last_loss
    assert last_loss is not None
    by_us = ending == signal.SIGSTOP
    assert last_loss.ending == ("killed by this server" if by_us else f"killed by {ending.name}")
    assert last_loss.was_up
    assert supervisor.failed_starts == 0

    assert_serves(fragile, supervisor.connection)


def assert_serves(rank: InferenceRank, connection: Connection) -> None:
    """A cache rank that was started again takes a request through some steps."""
    rank.connection = connection
    request = rank.arrive(prompt=20)
    for _ in range(3):
        rank.decode([request])
    rank.end(request)


def spawned_after(before: Connection, supervisor: Supervisor) -> Connection:
    """Wait until a cache rank has been spawned after another one, and return it."""
    wait_until(lambda: supervisor._spawned not in (None, before), LONG)
    assert supervisor._spawned is not None
    return supervisor._spawned


@pytest.mark.xdist_group("fragile cache rank")
def test_a_released_process_is_no_loss_and_the_next_one_opens_on_resume(
    fragile: InferenceRank,
) -> None:
    supervisor = fragile.supervisor
    wait_until(lambda: supervisor.connection is not None, LONG)
    counts = supervisor.starts, supervisor.losses, supervisor.failed_starts
    ended = supervisor.connection
    assert ended is not None
    downs = fragile.reports.downs

    supervisor.release()
    supervisor.release()
    with pytest.raises(ProcessLookupError):
        os.kill(ended.process.pid, 0)  # at once: its memory is wanted
    assert supervisor.connection is None
    wait_until(lambda: fragile.reports.downs == downs + 1, LONG)
    waiting = spawned_after(ended, supervisor)
    time.sleep(SILENCE_SECONDS)
    assert supervisor.connection is None  # the next one waits, however long
    assert (supervisor.starts, supervisor.losses, supervisor.failed_starts) == counts

    os.kill(waiting.process.pid, signal.SIGKILL)
    wait_until(lambda: supervisor.failed_starts == counts[2] + 1, LONG)
    spawned_after(waiting, supervisor)

    supervisor.resume()
    supervisor.resume()
    assert supervisor.connection is not None
    assert (supervisor.starts, supervisor.losses) == (counts[0] + 1, counts[1])
    assert_serves(fragile, supervisor.connection)


@pytest.mark.xdist_group("fragile cache rank")
def test_a_process_that_is_released_while_it_opens_does_not_come_up(
    fragile: InferenceRank,
) -> None:
    supervisor = fragile.supervisor
    wait_until(lambda: supervisor.connection is not None, LONG)
    starts, failed_starts = supervisor.starts, supervisor.failed_starts
    lost = supervisor.connection
    assert lost is not None
    supervisor.fail(lost, "a test")
    opening = spawned_after(lost, supervisor)
    supervisor.release()
    with pytest.raises(ProcessLookupError):
        os.kill(opening.process.pid, 0)
    supervisor.resume()
    assert supervisor.connection is not None
    assert supervisor.connection is not opening
    assert (supervisor.starts, supervisor.failed_starts) == (starts + 1, failed_starts)
    fragile.connection = supervisor.connection
