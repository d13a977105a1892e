"""Loads are drawn as they are asked for, and answers are measured right, however they come."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.profile_reasoning import parse_options
from scripts.shared.streaming import Answer
from scripts.shared.systems import to_flags
from scripts.speed.loads import Load, curve, longest_gap, measure, time_per_token

DRAWN = Load.parse("64x200-1000+8000/32000")


def answer(prompt: int, chunks: Iterable[tuple[int, float]], sent: float = 0.0) -> Answer:
    """An answer whose chunks have these tokens so far, and came at these times."""
    tokens, times = zip(*chunks, strict=True)
    return Answer(prompt, sent, array("q", tokens), array("d", times))


def steady(prompt: int, tokens: int, pace: float, sent: float = 0.0) -> Answer:
    """An answer whose tokens come one by one, each so many seconds after the last."""
    return answer(prompt, [(n, sent + n * pace) for n in range(1, tokens + 1)], sent)


class TestLoads:
    def test_a_load_has_fixed_or_drawn_lengths(self) -> None:
        assert Load.parse("64x512+12000")[1:] == (64, 512, 512, 12000, 12000)
        assert DRAWN[1:] == (64, 200, 1000, 8000, 32000)
        assert DRAWN.longest == 33000

    def test_fixed_lengths_are_as_they_are_asked_for(self) -> None:
        requests = Load.parse("3x20+40").draw(2, 300, seed=1)
        assert [(len(request.prompt), request.answer) for request in requests] == [(20, 40)] * 6

    def test_drawn_lengths_have_their_mean_and_maximum(self) -> None:
        requests = Load.parse("2000x2-4+800/3200").draw(1, 300, seed=1)
        answers = [request.answer for request in requests]
        assert {len(request.prompt) for request in requests} == {2, 3, 4}
        assert statistics.mean(answers) == pytest.approx(800, rel=0.05)
        assert 1 <= min(answers) < 100
        assert 2400 < max(answers) <= 3200
        assert statistics.median(answers) < 800  # most are short

    def test_requests_are_of_the_seed_and_share_no_prefix(self) -> None:
        load = Load.parse("8x20-30+40/90")
        assert load.draw(2, 300, seed=1) == load.draw(2, 300, seed=1)
        prompts = [tuple(r.prompt[:4]) for seed in (1, 2) for r in load.draw(2, 300, seed)]
        assert len(set(prompts)) == 32


class TestMeasures:
    @given(
        sizes=st.lists(st.integers(1, 40), min_size=2, max_size=30),
        pace=st.floats(0.001, 0.1),
        streams=st.integers(1, 4),
    )
    def test_a_steady_stream_has_its_pace_however_it_is_cut(
        self, sizes: list[int], pace: float, streams: int
    ) -> None:
        counts = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        answers = [answer(50, [(n, n * pace) for n in counts]) for _ in range(streams)]
        assert time_per_token(answers[0]) == pytest.approx(pace)
        found = curve(answers, streams, width=16)
        assert list(found.values()) == pytest.approx([streams / pace] * len(found))
        assert longest_gap(answers[0]).seconds == pytest.approx(max(sizes[1:]) * pace)

    def test_the_curve_falls_where_tokens_take_longer(self) -> None:
        slower = [0.001 * (n if n <= 100 else 100 + 2 * (n - 100)) for n in range(1, 301)]
        answers = [answer(0, enumerate(slower, start=1)) for _ in range(8)]
        found = curve(answers, 8, width=50)
        assert list(found) == [0, 50, 100, 150, 200, 250]
        assert [found[0], found[50]] == pytest.approx([8000, 8000], rel=0.02)
        assert [found[100], found[250]] == pytest.approx([4000, 4000], rel=0.02)

    def test_a_load_is_measured_from_its_first_request_to_its_last_token(self) -> None:
        load = Load.parse("2x100+100")
        answers = [steady(100, 100, 0.01, sent=5.0), steady(100, 100, 0.02, sent=5.5)]
        answers[1].statistics = {"sparse_steps": 50}
        run = measure(load, answers, client_seconds=0.25)
        assert (run.requests, run.tokens) == (2, 200)
        assert run.seconds == pytest.approx(2.5)
        assert run.tokens_per_second == pytest.approx(80)
        assert (run.ttft_p50, run.ttft_p99) == pytest.approx((0.01, 0.02))
        assert (run.tpot_p50, run.tpot_p99) == pytest.approx((0.01, 0.02))
        assert (run.sparse_requests, run.sparse_share) == (1, 0.25)
        assert run.client_share == pytest.approx(0.1)


class TestCommandLine:
    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("--systems floor --loads 1x1+1", "floor answers no requests"),
            ("--systems dense --loads 1x1+1 --model nothing", "no model"),
            ("--systems dense --loads 1x1+1 --rounds 0", "must be at least 1"),
        ],
    )
    def test_what_is_wrong_is_said(self, line: str, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            parse_options(line.split())

    def test_why_an_argument_is_wrong_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            parse_options("--systems dense --loads 8".split())
        assert "--loads: '8' is not a load" in capsys.readouterr().err

    def test_servers_side_by_side_share_the_streams(self) -> None:
        line = "--systems fp8 tp2-fp8 --servers 2 --loads 16x512+100 64x200-1000+8000/32000"
        plain, tensor_parallel = parse_options(line.split()).jobs
        assert plain.engine["max_running_requests"] == 33
        assert plain.engine["cuda_graph_bs_decode"] == [1, 2, 4, 8, 16, 32]
        assert plain.engine["context_length"] > 33000
        assert tensor_parallel.engine["max_running_requests"] == 65
        flags = to_flags(plain.engine)
        at = flags.index("--cuda-graph-bs-decode")
        assert flags[at + 1 : at + 7] == ["1", "2", "4", "8", "16", "32"]
        assert flags[at + 7].startswith("--")
        assert "--incremental-streaming-output" in flags
