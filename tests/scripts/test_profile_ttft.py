"""Prompts are asked again, and conversations grow, as is said; and what comes of it is reported."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import profile_ttft
from scripts.profile_ttft import Asked, Measurement, main, measure, parse_options
from scripts.speed import serving

ARGUMENTS = "--model bundled --lengths 400 --systems dense cache-rank-working-set".split()


class Server:
    """Answers at once; has all prompts in its cache that it has answered."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def ask(self, client: Any, prompt: list[int], asked: Asked) -> list[int]:
        known = [one for one in self.prompts if prompt[: len(one)] == one]
        asked.seconds.append(1.0 + len(self.prompts))
        asked.cached.append(max(map(len, known), default=0))
        answer = [7] * 10
        self.prompts += [[*prompt], [*prompt, *answer]]
        return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(profile_ttft, "ask", server.ask)
    return server


def test_each_turn_begins_with_all_that_was_said(server: Server) -> None:
    options, measurement = parse_options(ARGUMENTS), Measurement(system="dense", length=400)
    client: Any = server
    measure(2, [client], options.jobs[0], measurement)
    cached = {each.kind: each.cached for each in measurement.asked}
    assert cached["new"] == cached["turn 1"] == [0, 0]
    assert cached["again"] == [400, 400]
    assert [cached[f"turn {turn}"][0] for turn in (2, 3, 4)] == [110, 220, 330]
    assert all(len(each.seconds) == 2 for each in measurement.asked)
    # Nobody goes on before the others have had their turn.
    turns = [each.seconds for each in measurement.asked[2:]]
    assert all(max(turn) < min(later) for turn, later in itertools.pairwise(turns))


def test_a_system_that_fails_is_a_line_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    @contextlib.contextmanager
    def serve_job(job: Any, *_: Any) -> Iterator[list[Server]]:
        if job.cache_rank:
            raise RuntimeError("no room")
        yield [server]

    monkeypatch.setattr(serving, "serve_job", serve_job)
    assert main([*ARGUMENTS, "--repeats", "1", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "results.md").read_text()
    assert "| cache-rank-working-set | 400 | RuntimeError: no room |" in text
    assert "| dense | 400 | again |" in text


@pytest.mark.parametrize(
    "wrong", [["--repeats", "0"], ["--lengths", "3"], ["--systems", "none"]], ids=" ".join
)
def test_what_cannot_be_measured_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ValueError, match=r"at least|no system"):
        parse_options([*ARGUMENTS, *wrong])
