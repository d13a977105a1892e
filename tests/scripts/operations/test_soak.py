"""The soak finds what is wrong, and says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.operations.streams import Chain, Streams
from scripts.operations.watch import Memory
from scripts.shared.serving import Client
from scripts.soak import files_in

CHAIN = Chain(prompt=[1, 2, 3], answer=[10, 11, 12, 13])
MIB = 1 << 20


@pytest.mark.parametrize(
    ("tokens", "expected", "mistake"),
    [
        ([10, 11, 12, 13], 4, None),
        ([10, 11], 2, None),
        ([10, 11], None, None),  # it was aborted
        ([], None, None),
        ([10, 99, 12, 13], 4, "token 1 of 4 is wrong"),
        ([10, 99], None, "token 1 of 2 is wrong"),
        ([10, 11], 4, "2 tokens where 4 were asked for"),
        ([10, 11, 12, 13, 14], 4, "5 tokens where 4 were asked for"),
    ],
)
def test_an_answer_is_the_chain_or_a_beginning(
    tokens: list[int], expected: int | None, mistake: str | None
) -> None:
    said = CHAIN.mistake("soak-0", tokens, expected)
    assert said == (None if mistake is None else f"soak-0: {mistake}")


def test_a_server_that_is_gone_is_a_mistake() -> None:
    streams = Streams(Client("http://127.0.0.1:9"), streams=2)
    streams.stop()
    assert [one.kind for one in streams.ended][:1] == ["failed"]
    assert all(one.mistake for one in streams.ended)
    assert not streams.active()


@pytest.mark.parametrize(
    ("samples", "flat"),
    [
        ([], True),
        ([100] * 3, True),
        ([2000] * 40, True),
        ([100] * 8 + [2000] * 32, True),  # it has grown before it was used
        ([2000] * 20 + [2090] * 20, True),
        ([2000 + 40 * n for n in range(40)], False),
    ],
)
def test_memory_is_flat_if_it_does_not_go_on_growing(samples: list[int], flat: bool) -> None:
    assert Memory.of([sample * MIB for sample in samples]).flat is flat


def test_metrics_of_a_process_are_left_behind_once_it_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for name in (f"counter_{os.getpid()}.db", f"gauge_livesum_{ended.pid}.db", "meeting-1a2b"):
        (tmp_path / name).touch()
    found = {Path(name).name for name in files_in(tmp_path)}
    assert found == {f"gauge_livesum_{ended.pid}.db", "meeting-1a2b"}
