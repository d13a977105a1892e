"""Systems are measured side by side, and what was measured is kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import profile_tpot
from scripts.profile_tpot import main, parse_options, read_results
from scripts.shared import machine
from scripts.speed import serving
from scripts.speed.bench import (
    Measurement,
    NotMeasuredError,
    exchange_between,
    plan_batch,
    step_times,
    summarize,
)
from scripts.speed.serving import Job, Shape

SHAPE = Shape(8, 32768)


def job_of(system: str, *shapes: str) -> Job:
    arguments = ["--systems", system, "--shapes", *(shapes or ("8x32768",)), "--out", "nowhere"]
    (job,) = parse_options(arguments).jobs
    return job


class TestJobs:
    def test_cache_rank_job(self) -> None:
        job = job_of("cache-rank:sparse_budget=1024", "8x32768", "4x8192")
        assert job.gpus == 2
        assert job.engine["cache_rank_gpus"] == 1
        assert job.engine["sparse_budget"] == 1024
        assert job.engine["max_sparse_requests"] == 8
        assert job.engine["cuda_graph_bs_decode"] == [4, 8]

    def test_plain_job_has_no_flag_of_the_cache_rank(self) -> None:
        job = job_of("tp2-fp8")
        assert job.engine["tp_size"] == 2
        assert job.engine["kv_cache_dtype"] == "fp8_e4m3"
        assert not {"sparse_budget", "max_sparse_requests"} & set(job.engine)
        # 32768 tokens and room for output are within what the model was trained for.
        assert "json_model_override_args" not in job.engine

    def test_long_context_lengthens_the_rotary_table(self) -> None:
        job = job_of("dense", "1x131072")
        override = json.loads(job.engine["json_model_override_args"])
        assert override["max_position_embeddings"] == job.engine["context_length"] > 131072

    def test_floor_runs_at_the_budget_once_a_batch(self) -> None:
        job = job_of("floor", "8x32768", "8x65536", "16x32768")
        assert job.shapes == [Shape(8, 2048), Shape(16, 2048)]
        assert job_of("floor:sparse_budget=512").shapes == [Shape(8, 512)]
        assert "sparse_budget" not in job_of("floor:sparse_budget=512").engine


class TestStatistics:
    def test_step_times(self) -> None:
        assert step_times([1, 2, 3, 4], [0.0, 1.0, 1.5, 3.5], first=2, steps=2) == [0.5, 2.0]

    def test_tokens_that_arrive_together_share_their_time(self) -> None:
        assert step_times([1, 4, 5], [0.0, 3.0, 3.5], first=1, steps=4) == [1.0, 1.0, 1.0, 0.5]

    def test_summary(self) -> None:
        measurement = Measurement(system="dense", shape=SHAPE)
        summarize(measurement, [0.001, 0.001, 0.004, 0.002, 0.001, 0.003])
        assert measurement.medians == [1.0, 3.0, 2.0]
        assert measurement.tpot_ms == 2.0
        assert measurement.mean_ms == pytest.approx(2.0)
        assert measurement.p90_ms == 4.0

    def test_exchange(self) -> None:
        start = {"bulk_bytes": 5}
        before = {"steps": 10, "up_bytes": 100, "bulk_bytes": 65, "steps_waited": 4}
        after = {"steps": 20, "up_bytes": 300, "bulk_bytes": 65, "steps_waited": 5}
        found = exchange_between(start, before, after)
        assert found["up MB/step"] == pytest.approx(20e-6)
        assert found["bulk GB"] == pytest.approx(60e-9)
        assert found["late steps %"] == pytest.approx(10)
        assert exchange_between({}, {}, {}) == {}


INFO: dict[str, Any] = {
    "sparse_budget": 2048,
    "max_swap_tokens": 128,
    "query_window": 16,
    "bulk_chunk_tokens": 513,
    "inference_kv": "full",
    "max_total_num_tokens": 1 << 20,
}


class TestBench:
    def test_plan_waits_until_slots_are_full(self) -> None:
        plan = plan_batch(job_of("cache-rank"), SHAPE, INFO)
        assert plan.settle == 20 + 16 + 16
        assert plan.most_tokens >= 64 + plan.settle + 3 * 64

    def test_prompts_that_enter_in_turns_decode_for_longer(self) -> None:
        info, job = {**INFO, "inference_kv": "working-set"}, job_of("cache-rank-working-set")
        one = plan_batch(job, SHAPE, info)
        two = plan_batch(job, SHAPE, {**info, "max_total_num_tokens": 1 << 17})
        assert two.most_tokens == one.most_tokens + 2 * 64

    @pytest.mark.parametrize(
        "less",
        [
            {"max_total_num_tokens": 1 << 17},
            {"internal_states": [{"cache_rank": {"capacity_tokens": 1 << 17}}]},
        ],
    )
    def test_what_does_not_fit_is_not_tried(self, less: dict[str, Any]) -> None:
        with pytest.raises(NotMeasuredError, match="does not fit"):
            plan_batch(job_of("cache-rank"), SHAPE, {**INFO, **less})


def row_of(text: str, *cells: str) -> list[str]:
    """The cells of the table line that begins with these."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(line for line in lines if line[: len(cells)] == list(cells))


class TestCommandLine:
    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("--systems dense --shapes 8", "--shapes: '8' is not a shape: write BATCHxCONTEXT"),
            ("--engine-args {", "--engine-args: Expecting property name"),
        ],
    )
    def test_what_is_wrong_is_said(
        self, line: str, why: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            parse_options(line.split())
        assert why in capsys.readouterr().err

    def test_a_system_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(ValueError, match="no system 'x'"):
            job_of("x")


def test_a_server_that_does_not_start_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "START_SECONDS", 0)
    line = "--model bundled --shapes 1x400 2x400 --systems dense --out"
    assert main([*line.split(), str(tmp_path)]) == 1
    text = (tmp_path / "results.md").read_text()
    for shape in ("1 × 400", "2 × 400"):
        assert row_of(text, shape, "dense", "TimeoutError: server not ready:")
    assert len([*(tmp_path / "logs").iterdir()]) == 1


@pytest.mark.thorough
def test_a_system_is_measured_without_a_gpu(tmp_path: Path) -> None:
    line = f"--model bundled --shapes 2x400 --systems cache-rank --out {tmp_path}"
    assert main([*line.split(), *"--sparse-threshold 300 --sparse-budget 32".split()]) == 0
    (ours,) = read_results(tmp_path).measurements
    assert (ours.system, ours.shape, ours.failure) == ("cache-rank", Shape(2, 400), "")
    assert len(ours.medians) == 3
    assert ours.tpot_ms is not None
    assert ours.exchange["down MB/step"] > 0
    assert row_of((tmp_path / "results.md").read_text(), "2 × 400", "cache-rank")


class TestRecord:
    """What a run does with what an earlier one has left in the same folder."""

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
        """Profile systems, of which fp8 fails, on GPUs of a kind; the exit status."""

        @contextlib.contextmanager
        def serve_job(job: Job, *_: Any) -> Iterator[list[object]]:
            if job.system == "fp8":
                raise RuntimeError("out of memory")
            yield []

        def measure_shape(_servers: object, _job: Job, measurement: Measurement) -> None:
            summarize(measurement, [0.005] * 6)

        def run(systems: str, *options: str, kind: str = "H200") -> int:
            monkeypatch.setattr(machine, "describe", lambda _: {"gpus": [kind]})
            out = ["--shapes", "8x32768", "--out", str(tmp_path)]
            return main(["--systems", *systems.split(), *out, *options])

        monkeypatch.setattr(serving, "serve_job", serve_job)
        monkeypatch.setattr(profile_tpot, "measure_shape", measure_shape)
        return run

    def test_what_is_missing_is_measured(self, run: Callable[..., int], tmp_path: Path) -> None:
        assert run("fp8") == 1
        assert run("dense") == 0  # failures are nothing to keep
        assert run("dense quest", "--resume") == 0
        results = read_results(tmp_path)
        assert len(results.commands) == 2
        assert [one.system for one in results.measurements] == ["dense", "quest"]

    @pytest.mark.parametrize(
        ("options", "kind", "why"),
        [
            ("", "H200", "has results: pass --resume, or another --out"),
            ("--resume --model qwen3-4b", "H200", "was measured with {'model': 'qwen3-8b'"),
            ("--resume", "H100", "not {'model': 'qwen3-8b'"),
        ],
    )
    def test_other_conditions_are_refused(
        self,
        run: Callable[..., int],
        options: str,
        kind: str,
        why: str,
        tmp_path: Path,
    ) -> None:
        assert run("dense") == 0
        before = read_results(tmp_path)
        with pytest.raises(ValueError, match=why):
            run("quest", *options.split(), kind=kind)
        assert read_results(tmp_path) == before
