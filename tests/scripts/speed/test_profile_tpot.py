"""The parts of profile_tpot that need no engine and measure nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from cache_rank.config import CacheRankConfig, ModelShape, ScoreKeys
from scripts.profile_tpot import main, parse_options
from scripts.shared import machine
from scripts.shared.models import MODEL_SHAPES, model_config, model_shape
from scripts.speed import profile, report
from scripts.speed.bench import (
    NotMeasuredError,
    Stream,
    arrival_of,
    make_prompts,
    plan_batch,
    progress_of,
    unmeasurable,
)
from scripts.speed.cache_step import measure_cache_step
from scripts.speed.calibration import needs_calibration, write_blank
from scripts.speed.experiments import EXPERIMENTS, TABLE2, TABLE2_FLOOR, table2
from scripts.speed.jobs import (
    CAPACITY_BATCHES,
    Job,
    Settings,
    Shape,
    Wish,
    divide,
    make_job,
)
from scripts.speed.profile import make_jobs
from scripts.speed.records import (
    Measurement,
    Results,
    TraceTimes,
    explain_failure,
    quantile,
    step_times,
    summarize,
    together,
    wire_between,
)
from scripts.speed.runner import run_job, run_worker
from scripts.speed.trace import reduce_trace
from scripts.speed.weights import DUMMY_LARGEST, norms_for_unit_logits
from scripts.speed.worker import search_capacity
from sglang_ext.calibration.files import read, sources

MODEL = "qwen3-8b"
SHAPE = Shape(8, 32768)


def job_of(system: str, *shapes: Shape, **settings: object) -> Job:
    wish = Wish(MODEL, system, shapes or (SHAPE,))
    return make_job(wish, msgspec.convert(settings, Settings), Path("out"))


class TestJobs:
    def test_shape_reads_what_it_prints(self) -> None:
        assert Shape.parse("8x32768") == SHAPE
        assert Shape.parse(str(SHAPE)) == SHAPE

    @pytest.mark.parametrize("text", ["8", "8x", "x8", "8x1x1", "0x5", "8x-1", "axb", ""])
    def test_shape_refuses_what_is_none(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"shape|at least 1"):
            Shape.parse(text)

    def test_cache_rank_job(self) -> None:
        job = job_of("cache-rank:sparse_budget=1024", SHAPE, Shape(4, 8192), trace=True)
        assert job.gpus == 2
        assert job.engine["cache_rank_gpus"] == 1
        assert job.engine["sparse_budget"] == 1024
        assert job.engine["max_sparse_requests"] == 8
        assert job.engine["cuda_graph_bs_decode"] == [4, 8]
        assert job.engine["trace"] == job.trace
        assert job.trace.endswith(".json")

    def test_plain_job_has_no_flag_of_the_cache_rank(self) -> None:
        job = job_of("tp2-fp8", trace=True)
        assert job.engine["tp_size"] == 2
        assert job.engine["kv_cache_dtype"] == "fp8_e4m3"
        assert not {"sparse_budget", "trace", "max_sparse_requests"} & set(job.engine)
        # 32768 tokens and room for output are within what the model was trained for.
        assert "json_model_override_args" not in job.engine

    def test_long_context_lengthens_the_rotary_table(self) -> None:
        job = job_of("dense", Shape(1, 131072))
        override = json.loads(job.engine["json_model_override_args"])
        assert override["max_position_embeddings"] == job.engine["context_length"] > 131072

    def test_floor_runs_at_the_budget_once_a_batch(self) -> None:
        job = job_of("floor", SHAPE, Shape(8, 65536), Shape(16, 32768))
        assert job.shapes == [Shape(8, 2048), Shape(16, 2048)]
        assert job_of("floor:sparse_budget=512").shapes == [Shape(8, 512)]
        assert "sparse_budget" not in job_of("floor:sparse_budget=512").engine

    def test_capacity_search_captures_its_batches(self) -> None:
        assert job_of("dense", capacity=32768).engine["cuda_graph_bs_decode"] == [*CAPACITY_BATCHES]
        assert job_of("dense", capacity=32768).capacity == 32768
        floor = job_of("floor", capacity=32768)
        assert floor.capacity == 0
        assert [shape.batch for shape in floor.shapes] == [*CAPACITY_BATCHES]

    def test_two_servers_share_batches_gpus_and_ports(self) -> None:
        job = job_of("two-quest", SHAPE, Shape(4, 8192))
        assert (job.gpus, job.servers) == (2, 2)
        assert job.engine["cuda_graph_bs_decode"] == [2, 4]
        job.engine["port"] = 30000
        first, second = divide(job)
        assert first.shapes == second.shapes == [Shape(4, 32768), Shape(2, 8192)]
        assert (first.gpus, first.servers, first.engine["port"]) == (1, 1, 30000)
        assert second.engine == {**first.engine, "port": 30100}
        assert len({job.name, first.name, second.name}) == 3

    @pytest.mark.parametrize("asked", ["--shapes 3x8192", "--capacity 8192"])
    def test_what_two_servers_cannot_share_is_refused(
        self, asked: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(f"--systems two-fp8 {asked} --dry-run".split()) == 2
        assert "2 servers need batches that are multiples" in capsys.readouterr().err

    def test_job_survives_the_way_to_the_worker(self) -> None:
        job = job_of("cache-rank", trace=True)
        assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job

    def test_name_is_a_file_name(self) -> None:
        assert "/" not in job_of("cache-rank:query_predictor=a/b").name

    def test_short_context_is_not_measured_sparsely(self) -> None:
        assert "threshold" in unmeasurable(job_of("quest"), Shape(8, 1024))
        assert not unmeasurable(job_of("dense"), Shape(8, 1024))
        assert "beyond" in unmeasurable(job_of("dense"), Shape(8, 1 << 20))

    @pytest.mark.parametrize("model", sorted(path.name for path in MODEL_SHAPES.iterdir()))
    def test_model_shapes_load(self, model: str) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(MODEL_SHAPES / model)
        assert str(config.dtype) == "torch.bfloat16"
        assert config.num_attention_heads % config.num_key_value_heads == 0
        assert config.head_dim == 128

    @pytest.mark.parametrize("experiment", EXPERIMENTS)
    def test_presets_are_jobs(self, experiment: str) -> None:
        results = Results()
        jobs = make_jobs(parse_options(["--experiment", experiment]), results)
        assert len({job.name for job in jobs}) == len(jobs)
        engines = [job for job in jobs if not job.cache_step]
        assert all(not unmeasurable(job, shape) for job in engines for shape in job.shapes)

    def test_table2_covers_the_paper(self) -> None:
        # Two models, two batches, two packings; the paper's 16 rows are these on two devices.
        assert len(set(TABLE2)) == 8
        wishes = table2(["qwen3-8b"])
        assert wishes[0] == Wish("qwen3-8b", TABLE2_FLOOR, (Shape(8, 2048), Shape(16, 1024)))
        assert len(wishes) == 5

    def test_resume_leaves_out_what_was_measured(self) -> None:
        options = parse_options("--shapes 8x32768 4x32768 --systems dense fp8".split())
        results = Results(
            measurements=[
                Measurement(MODEL, "dense", SHAPE, tpot_ms=1.0),
                Measurement(MODEL, "fp8", SHAPE, failure="out of memory"),
            ]
        )
        shapes = {job.system: job.shapes for job in make_jobs(options, results)}
        assert shapes == {"dense": [Shape(4, 32768)], "fp8": [SHAPE, Shape(4, 32768)]}


class TestStatistics:
    def test_quantile(self) -> None:
        values = [float(value) for value in range(10, 0, -1)]
        assert quantile(values, 0.1) == 1.0
        assert quantile(values, 0.5) == 5.0
        assert quantile(values, 0.9) == 9.0
        assert quantile(values, 1.0) == 10.0
        assert quantile([3.0], 0.0) == quantile([3.0], 0.99) == 3.0

    def test_step_times(self) -> None:
        arrivals = [(1, 0.0), (2, 1.0), (3, 1.5), (4, 3.5)]
        assert step_times(arrivals, first=2, steps=2) == [0.5, 2.0]

    def test_tokens_that_arrive_together_share_their_time(self) -> None:
        assert step_times([(1, 0.0), (4, 3.0), (5, 3.5)], first=1, steps=4) == [1.0, 1.0, 1.0, 0.5]

    def test_unseen_tokens_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="not all seen"):
            step_times([(5, 0.0), (6, 1.0)], first=4, steps=2)

    def test_summary(self) -> None:
        measurement = Measurement(MODEL, "dense", SHAPE)
        summarize(measurement, [0.001, 0.001, 0.004, 0.002, 0.002, 0.002], window=3)
        assert [repeat.median for repeat in measurement.repeats] == [1.0, 2.0]
        assert measurement.tpot_ms == 1.5
        assert measurement.mean_ms == pytest.approx(2.0)
        assert measurement.p90_ms == 4.0
        assert measurement.tokens_per_second == pytest.approx(4000.0)

    def test_wire(self) -> None:
        start = {"bulk_bytes": 5}
        before = {"steps": 10, "up_bytes": 100, "bulk_bytes": 65, "steps_waited": 4}
        after = {"steps": 20, "up_bytes": 300, "bulk_bytes": 65, "steps_waited": 5}
        wire = wire_between(start, before, after)
        assert wire is not None
        assert (wire.first_step, wire.last_step) == (11, 20)
        assert (wire.up_bytes, wire.down_bytes, wire.bulk_bytes) == (20.0, 0.0, 60.0)
        assert wire.late_share == pytest.approx(0.1)
        assert wire_between({}, {}, {}) is None

    @pytest.mark.parametrize(
        ("log", "ready", "late", "phrase"),
        [
            ("torch.OutOfMemoryError: CUDA out of memory", False, False, "out of memory"),
            ("RuntimeError: Not enough memory. Please", False, True, "out of memory"),
            ("", False, False, "did not start"),
            ("a.BError: no\nlog\nTypeError: x\nlog", False, False, "did not start (TypeError: x)"),
            ("", False, True, "did not start in time"),
            ("", True, True, "ran out of time"),
            ("", True, False, "ended while measuring"),
        ],
    )
    def test_failures_have_a_phrase(self, log: str, ready: bool, late: bool, phrase: str) -> None:
        assert explain_failure(log, ready, late) == phrase


def event(rank: str, name: str, step: int, ts: float, dur: float) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": rank,
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {"step": step, "group": 0},
    }


EVENTS = [
    made
    for step in range(1, 5)
    for made in (
        event("inference", "group", step, 1000.0 * step, 400.0),
        event("inference", "group", step, 1000.0 * step + 500, 400.0),
        event("inference", "wait", step, 1000.0 * step + 450, 10.0 * step),
        event("cache", "score", step, 7.0, 300.0),
        event("cache", "select", step, 8.0, 100.0),
        event("cache", "receive", step, 9.0, 9999.0),
        event("inference", f"layer {step}", step, 1000.0 * step, 50.0),
    )
]


def trace_file(path: Path, *events: dict[str, object], end: str = "") -> Path:
    """A trace as both ranks write it."""
    path.write_text("[\n" + "".join(f"{json.dumps(event)},\n" for event in events) + end)
    return path


class TestTrace:
    @pytest.mark.parametrize("end", ["", '{"name": "brok'])
    def test_reduced(self, tmp_path: Path, end: str) -> None:
        """A rank that is stopped may leave half a line."""
        times = reduce_trace(trace_file(tmp_path / "trace.json", *EVENTS, end=end), None)
        assert times is not None
        assert times.steps == 4
        assert times.step_ms == 1.0
        assert times.management_ms == pytest.approx(0.4)
        assert times.median_us["cache receive"] == 9999.0
        assert times.median_us["inference wait"] == 25.0
        assert times.median_us["inference layer"] == 50.0
        assert times.wait_share_p50 == pytest.approx(0.02)
        assert times.wait_share_p99 == pytest.approx(0.03)

    def test_only_the_measured_steps_count(self, tmp_path: Path) -> None:
        path = trace_file(tmp_path / "trace.json", *EVENTS)
        wire = wire_between({}, {"steps": 2}, {"steps": 4})
        times = reduce_trace(path, wire)
        assert times is not None
        assert times.steps == 2
        assert reduce_trace(path, wire_between({}, {"steps": 90}, {"steps": 99})) is None

    def test_no_file_and_no_steps(self, tmp_path: Path) -> None:
        assert reduce_trace(tmp_path / "none.json", None) is None
        assert reduce_trace(trace_file(tmp_path / "empty.json"), None) is None


ARGUMENTS = SimpleNamespace(
    sparse_budget=2048,
    max_swap_tokens=128,
    query_window=16,
    bulk_chunk_tokens=513,
    inference_kv="full",
)


class TestWorker:
    def test_prompts_are_of_the_seed(self) -> None:
        shape = Shape(3, 50)
        prompts = make_prompts(shape, 1000, seed=1)
        assert prompts == make_prompts(shape, 1000, seed=1)
        assert prompts != make_prompts(shape, 1000, seed=2)
        assert [len(prompt) for prompt in prompts] == [50, 50, 50]
        assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
        assert all(token < 260 for token in make_prompts(shape, 260, seed=1)[0])

    def test_plan_waits_until_slots_are_full(self) -> None:
        plan = plan_batch(job_of("cache-rank"), SHAPE, ARGUMENTS, 1 << 20, 1 << 20)
        assert plan.settle == 20 + 16 + 16
        assert plan.most_tokens >= 64 + plan.settle + 3 * 64

    def test_plan_of_a_plain_system(self) -> None:
        plan = plan_batch(job_of("dense", skip_steps=3), SHAPE, None, 1 << 20, None)
        assert plan.settle == 3

    def test_prompts_that_enter_in_turns_decode_for_longer(self) -> None:
        arguments = SimpleNamespace(**{**vars(ARGUMENTS), "inference_kv": "working-set"})
        job = job_of("cache-rank-working-set")
        one = plan_batch(job, SHAPE, arguments, 1 << 20, 1 << 20)
        two = plan_batch(job, SHAPE, arguments, 1 << 17, 1 << 20)
        assert two.most_tokens == one.most_tokens + 2 * 64

    @pytest.mark.parametrize(("pool", "cache_rank"), [(1 << 17, 1 << 20), (1 << 20, 1 << 17)])
    def test_what_does_not_fit_is_not_tried(self, pool: int, cache_rank: int) -> None:
        with pytest.raises(NotMeasuredError, match="does not fit"):
            plan_batch(job_of("cache-rank"), SHAPE, ARGUMENTS, pool, cache_rank)

    @pytest.mark.parametrize(("most", "found"), [(48, 48), (20, 16), (7, None)])
    def test_the_largest_batch_that_is_measured_is_the_capacity(
        self, most: int, found: int | None
    ) -> None:
        """The report also says why larger ones were not measured."""

        def measure(measurement: Measurement) -> None:
            measurement.ended = 1.0
            measurement.failure = "" if measurement.shape.batch <= most else "a request ended"

        bench = SimpleNamespace(pool_tokens=50 * 1000, measure=measure)
        told = map(msgspec.structs.replace, search_capacity(bench, job_of("dense", capacity=600)))
        ended = [measurement for measurement in told if measurement.ended]
        assert [m.shape.batch for m in ended if m.capacity_search and not m.failure] == (
            [found] if found else []
        )
        assert sum(m.capacity_search for m in ended) == 1
        tried = [m.shape.batch for m in ended if not m.capacity_search]
        assert tried == [batch for batch in (48, 32, 24, 16, 8) if batch > most]

    def test_progress(self) -> None:
        stream = Stream([(1, 0.0), (40, 1.0)], {"sparse_steps": 12})
        assert progress_of(stream, cache_rank=True) == 12
        assert progress_of(stream, cache_rank=False) == 40
        assert progress_of(Stream(), cache_rank=False) == 0

    @pytest.mark.parametrize(
        ("seconds", "reason"),
        [(600.0, "did not start (ValueError: "), (0.0, "did not start in time")],
    )
    def test_a_worker_that_fails_is_explained_by_its_log(
        self, seconds: float, reason: str, tmp_path: Path
    ) -> None:
        job, noted = job_of("cache-step", SHAPE), list[Measurement]()
        job.gpus, job.engine = 0, {"kv_residency_options": "nothing"}
        why = run_worker(job, [], tmp_path, seconds, threading.Event(), noted.append)
        assert why.startswith(reason)
        assert noted == []


def test_servers_that_share_a_batch_are_one_system() -> None:
    parts = [measured(MODEL, "two-fp8", Shape(4, 8192), time) for time in (10.0, 20.0)]
    both = together(parts, Shape(8, 8192))
    assert both.shape == Shape(8, 8192)
    assert both.tpot_ms == 15
    assert (both.p10_ms, both.p90_ms) == (10, 20)
    assert both.tokens_per_second == pytest.approx(400 + 200)
    assert len(both.repeats) == 4
    assert both.memory_gib == [100.0, 20.5] * 2
    parts[1].failure = "out of memory"
    failed = together(parts, Shape(8, 8192))
    assert (failed.failure, failed.tpot_ms, failed.mean_ms) == ("out of memory", None, None)


def test_servers_of_a_job_run_at_the_same_time(tmp_path: Path) -> None:
    job, noted = job_of("cache-step", Shape(2, 600), repeats=1, window=2), list[Measurement]()
    job.servers, job.model, job.gpus = 2, "bundled", 0
    job.engine = {"sparse_budget": 32, "layers_per_group": 1}
    why = run_job(job, [], tmp_path, 120.0, threading.Event(), noted.append)
    assert "-1.log; " in why
    begun, ended = noted[0], noted[-1]
    assert not begun.ended
    assert [measurement.ended > 0 for measurement in noted].count(True) == 1
    assert ended.shape == Shape(2, 600)
    assert ended.failure == ""
    assert len(ended.repeats) == 2
    assert ended.tokens_per_second


def measured(model: str, system: str, shape: Shape, milliseconds: float) -> Measurement:
    measurement = Measurement(model, system, shape, memory_gib=[100.0, 20.5])
    summarize(measurement, [milliseconds / 1e3] * 4, window=2)
    return measurement


def example(experiment: str = "") -> Results:
    results = Results(experiment, ["python", "-m", "scripts.profile_tpot"])
    results.measurements = [
        measured(MODEL, "floor", Shape(8, 2048), 6.0),
        measured(MODEL, "dense", SHAPE, 14.0),
        measured(MODEL, "quest", SHAPE, 10.0),
        measured(MODEL, "window", SHAPE, 8.0),
        measured(MODEL, "cache-rank", SHAPE, 6.1),
        Measurement(MODEL, "tp2", SHAPE, "out of memory: see logs/a|b.log"),
    ]
    ours = results.measurements[4]
    ours.wire = wire_between({}, {}, {"steps": 10, "down_bytes": 5e8, "up_bytes": 1e7})
    ours.trace = TraceTimes(10, {"cache score": 300.0}, 6.0, 4.0, 0.001, 0.02)
    return results


def row_of(text: str, *cells: str) -> list[str]:
    """The cells of the table line that begins with these."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(line for line in lines if line[: len(cells)] == list(cells))


class TestReport:
    def test_table(self) -> None:
        text = report.markdown(example())
        row = row_of(text, "8 × 32768", "cache-rank")
        assert row[2:7] == ["6.10", "6.10–6.10", "6.10", "1311", "1.02"]
        assert row[-1] == "100.0 + 20.5"
        assert "50.00" in row
        failed = row_of(text, "8 × 32768", "tp2")
        assert failed[2] == "out of memory: see logs/a/b.log"
        assert len(failed) == len(row)
        assert row_of(text, "8 × 32768", "cache-rank", "10")[3:7] == [
            "6.00",
            "4.00",
            "0.10 %",
            "2.00 %",
        ]

    def test_table2(self) -> None:
        results = Results("table2")
        first = TABLE2[0]
        ours = measured(first.model, first.system, first.shape, 3.0)
        ours.wire = wire_between({}, {}, {"steps": 10, "down_bytes": 6e8})
        results.measurements = [measured(first.model, TABLE2_FLOOR, first.floor, 6.0), ours]
        row = row_of(report.markdown(results), first.model, "8 × 32768, 2048", "6")
        # Six of 36 layers; 60 MB in 6 ms; 2.4 GB of bf16 K and V in 6 ms.
        assert row[3:7] == ["1.00", "0.50", "0.50", "10.00"]
        assert float(row[7]) == pytest.approx(2 * 2 * 36 * 8 * 128 * 8 * 2048 / 6e6, abs=0.01)
        missing = row_of(report.markdown(results), "qwen3-32b")
        assert missing[3:7] == ["–"] * 4

    def test_quest_share(self) -> None:
        results = example("quest-time")
        assert report.quest_share(results, MODEL, SHAPE) == pytest.approx(0.2)
        assert report.quest_share(results, MODEL, Shape(1, 1)) is None
        row = row_of(report.markdown(results), MODEL, "8 × 32768")
        assert row[2:] == ["10.00", "8.00", "20.0 %"]

    def test_written_and_read_again(self, tmp_path: Path) -> None:
        results = example()
        results.jobs = [job_of("dense")]
        files = report.write_results(results, tmp_path)
        assert [path.name for path in files] == ["results.json", "results.md"]
        assert sorted(tmp_path.iterdir()) == sorted(files)
        assert report.read_results(files[0]) == results

    @pytest.mark.parametrize(
        ("system", "floor"),
        [
            ("cache-rank", 6.0),
            ("floor", 6.0),
            ("cache-rank:calibration=blank,attention_backend=triton", 6.2),
            ("floor:attention_backend=triton", 6.2),
            ("cache-rank:attention_backend=flashinfer", 6.0),  # whose floor has no number
        ],
    )
    def test_a_floor_is_that_of_the_systems_changes(self, system: str, floor: float) -> None:
        results = example()
        results.measurements += [
            Measurement(MODEL, "floor:attention_backend=flashinfer", Shape(8, 2048), "no memory"),
            measured(MODEL, "floor:attention_backend=triton", Shape(8, 2048), 6.2),
            measured(MODEL, "floor:attention_backend=triton,page_size=1", Shape(8, 2048), 6.4),
            Measurement(MODEL, "floor", Shape(8, 2048), "out of memory"),
        ]
        assert report.floor_of(results, MODEL, system, 8) == pytest.approx(floor)
        assert report.floor_of(results, MODEL, system, 16) is None
        assert row_of(report.markdown(results), "8 × 32768", "cache-rank")[6] == "1.02"

    def test_no_floor_of_other_changes_stands_in(self) -> None:
        results = Results(measurements=[measured(MODEL, "floor:page_size=1", SHAPE, 6.0)])
        assert report.floor_of(results, MODEL, "cache-rank", 8) is None

    @pytest.mark.parametrize("experiment", ["", "table2", "quest-time"])
    def test_plots(self, tmp_path: Path, experiment: str) -> None:
        pytest.importorskip("matplotlib")
        results = example(experiment)
        plots = report.write_plots(results, tmp_path)
        assert plots[0].name == f"tpot-{MODEL}.png"
        assert len(plots) == 1 + bool(experiment)
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)

    def test_the_line_of_a_plot_is_the_floor_without_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn: list[object] = []
        monkeypatch.setattr(report, "grouped_bars", lambda *_, floors: drawn.append(floors) or [])
        results = example()
        triton = measured(MODEL, "floor:attention_backend=triton", Shape(8, 2048), 6.2)
        results.measurements.append(triton)
        report.tpot_plot(results, MODEL, tmp_path)
        assert drawn == [[pytest.approx(6.0)]]

    def test_no_plot_of_nothing(self, tmp_path: Path) -> None:
        assert report.write_plots(Results(), tmp_path) == []

    def test_jobs_are_described(self) -> None:
        text = report.describe_jobs([job_of("cache-rank", capacity=32768)])
        assert "8x32768" in text
        assert "largest batch of 32768" in text


class TestCommandLine:
    @pytest.mark.parametrize("line", ["", "--systems dense", "--shapes 8x100", "--shapes 8"])
    def test_incomplete_lines_are_refused(self, line: str) -> None:
        with pytest.raises(SystemExit):
            parse_options(line.split())

    def test_unknown_system_is_an_error(self) -> None:
        options = parse_options("--shapes 1x10 --systems nothing".split())
        with pytest.raises(ValueError, match="no system"):
            make_jobs(options, Results())

    def test_unknown_model_is_an_error(self) -> None:
        options = parse_options("--shapes 1x10 --systems dense --model nothing".split())
        with pytest.raises(ValueError, match="no model"):
            make_jobs(options, Results())

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("--systems dense --shapes 8", "--shapes: '8' is not a shape: write BATCHxCONTEXT"),
            ("--engine-args {", "--engine-args: Expecting property name"),
            ("--window 0", "--repeats and --window must be at least 1"),
            ("--repeats 0", "--repeats and --window must be at least 1"),
        ],
    )
    def test_what_is_wrong_is_said(
        self, line: str, why: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            parse_options(line.split())
        assert why in capsys.readouterr().err

    def test_no_record_is_no_traceback(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--render", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert str(tmp_path / "results.json") in line


class TestRecord:
    """What a run does with what an earlier one has left in the same folder."""

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
        """Profile systems, of which fp8 fails, on GPUs of a kind; the exit status."""
        ours: dict[str, str] = {}

        def describe(gpus: Sequence[str]) -> dict[str, object]:
            return {"gpus": [ours["kind"]] * len(gpus)}

        def run_job(job: Job, *rest: object) -> str:
            note = rest[-1]
            assert callable(note)
            for shape in job.shapes if job.system != "fp8" else ():
                ended = measured(job.model, job.system, shape, 5.0)
                ended.ended = 1.0
                note(ended)
            return "out of memory"

        def run(systems: str, *options: str, kind: str = "H200", gpus: str = "0") -> int:
            ours["kind"] = kind
            out = ["--shapes", "8x32768", "--gpus", gpus, "--out", str(tmp_path)]
            return main(["--systems", *systems.split(), *out, *options])

        monkeypatch.setattr(profile, "run_job", run_job)
        monkeypatch.setattr(machine, "describe", describe)
        return run

    def read(self, out: Path) -> Results:
        return report.read_results(out / "results.json")

    def test_the_status_says_whether_something_is_missing(
        self, run: Callable[..., int], tmp_path: Path
    ) -> None:
        assert run("dense fp8") == 1
        assert run("dense", "--resume") == 0
        assert [m.system for m in self.read(tmp_path).measurements] == ["dense"]

    def test_what_was_measured_is_not_overwritten(
        self, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("fp8") == 1
        assert run("dense") == 0  # failures are nothing to keep
        before = self.read(tmp_path)
        assert before.earlier_commands == []
        assert run("quest") == 2
        assert f"{tmp_path} has results: pass --resume, or another --out" in capsys.readouterr().err
        assert run("quest", "--dry-run") == 0
        assert self.read(tmp_path) == before

    def test_a_resumed_record_names_all_commands_and_gpus(
        self, run: Callable[..., int], tmp_path: Path
    ) -> None:
        assert run("dense", gpus="0,1") == 0
        assert run("quest", "--resume", "--shape-seconds", "9", gpus="1") == 0
        results = self.read(tmp_path)
        assert [m.system for m in results.measurements] == ["dense", "quest"]
        assert results.machine["gpus"] == ["H200", "H200"]
        assert [command.split()[4] for command in results.commands] == ["dense", "quest"]
        text = (tmp_path / "results.md").read_text()
        assert all(f"`{command}`" in text for command in results.commands)

    @pytest.mark.parametrize(
        ("options", "kind", "why"),
        [
            ("--window 32", "H200", "window 64, not 32"),
            ("--seed 2", "H200", "seed 1, not 2"),
            ('--engine-args {"page_size":2}', "H200", "engine {}, not {'page_size': 2}"),
            ("", "H100", "GPUs H200, not H100"),
        ],
    )
    def test_other_conditions_are_refused(
        self,
        run: Callable[..., int],
        options: str,
        kind: str,
        why: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert run("dense") == 0
        before = self.read(tmp_path)
        assert run("quest", "--resume", *options.split(), kind=kind) == 2
        said = f"{tmp_path} was measured with {why}: pass another --out"
        assert said in capsys.readouterr().err
        assert self.read(tmp_path) == before

    def test_another_release_is_refused(
        self,
        run: Callable[..., int],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert run("dense") == 0
        monkeypatch.setattr("importlib.metadata.version", lambda name: f"another {name}")
        assert run("quest", "--resume") == 2
        assert "not another sglang: pass another --out" in capsys.readouterr().err

    def test_another_model_may_have_other_settings(self, run: Callable[..., int]) -> None:
        assert run("dense") == 0
        assert run("dense", "--resume", "--model", "qwen3-32b", "--window", "32") == 0

    def test_records_of_earlier_versions_are_read(
        self, run: Callable[..., int], tmp_path: Path
    ) -> None:
        assert run("dense") == 0
        record = json.loads((tmp_path / "results.json").read_text())
        del record["earlier_commands"]
        (tmp_path / "results.json").write_text(json.dumps(record))
        assert main(["--render", str(tmp_path)]) == 0
        assert run("quest", "--resume") == 0


class TestArrival:
    def test_a_cache_rank_has_room_for_one_more(self) -> None:
        job, plain = job_of("cache-rank", SHAPE, arrival=True), job_of("dense", SHAPE, arrival=True)
        assert job.engine["max_sparse_requests"] == SHAPE.batch + 1
        assert job.engine["cuda_graph_bs_decode"] == [SHAPE.batch, SHAPE.batch + 1]
        assert plain.engine["cuda_graph_bs_decode"] == [SHAPE.batch]
        assert (job.measures_arrival, plain.measures_arrival) == (True, False)

    def test_steps_count_between_the_reports_of_the_one_that_arrived(self) -> None:
        witness, arriving = Stream(), Stream()
        witness.arrivals = [(1, 0.0), (2, 1.0), (3, 1.010), (5, 1.050), (6, 1.055), (7, 9.0)]
        arriving.arrivals = [(1, 1.0), (2, 1.03), (3, 1.055)]
        found = arrival_of(witness, arriving)
        assert found.steps == 3
        assert found.median_ms == pytest.approx(10)
        assert found.longest_ms == pytest.approx(20)


class TestWeights:
    @pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b"])
    def test_logits_have_about_unit_variance(self, name: str) -> None:
        config = model_config(name)
        norms = dict(norms_for_unit_logits(config))
        assert {int(name.split(".")[2]) for name in norms} == set(
            range(config["num_hidden_layers"])
        )
        torch.manual_seed(0)
        hidden, head_dim = config["hidden_size"], 128
        normalized = torch.nn.functional.rms_norm(torch.randn(200, hidden), (hidden,))
        normalized *= norms["model.layers.3.input_layernorm.weight"].float()
        projected = [
            normalized @ torch.empty(hidden, head_dim).uniform_(-DUMMY_LARGEST, DUMMY_LARGEST)
            for _ in range(2)
        ]
        if name.startswith("qwen3"):
            projected = [
                torch.nn.functional.rms_norm(
                    part,
                    (head_dim,),
                    norms[f"model.layers.3.self_attn.{which}_norm.weight"].float(),
                )
                for part, which in zip(projected, "qk", strict=True)
            ]
        logits = projected[0] @ projected[1].T * head_dim**-0.5
        assert 0.8 < float(logits.std()) < 1.2


class TestCacheStep:
    def test_shapes_are_those_of_the_model(self) -> None:
        for name in ("qwen3-8b", "llama-3.1-8b"):
            shape = model_shape(model_config(name))
            assert (shape.query_heads, shape.kv_heads, shape.head_dim) == (32, 8, 128)
            assert len(shape.rotary_frequency) == 64
            assert shape.rotary_frequency[0] == 1

    @pytest.mark.parametrize("score_keys", ["resident", "sketch"])
    def test_steps_are_timed_once_the_slots_are_full(self, score_keys: ScoreKeys) -> None:
        model = ModelShape(4, 4, 2, 32, "float32", 0.25)
        config = CacheRankConfig(
            model,
            layers_per_group=3,
            sparse_budget=40,
            hysteresis=0,
            max_swap_tokens=16,
            max_rows=2,
            score_keys=score_keys,
        )
        found = measure_cache_step(config, 512, 5, torch.device("cpu"))
        assert len(found.seconds) == 5
        assert min(found.seconds) > 0
        # q, k and v of two requests, float32.
        assert found.up_bytes == 2 * 4 * (4 + 2 * 2) * 32 * 4
        assert 0 < found.tokens_shipped < 2 * 4 * 2 * 16
        assert found.down_bytes > 2 * 4 * 2 * 16 * 2 * 32 * 4

    def test_no_engine_is_needed(self, tmp_path: Path) -> None:
        """A format may have options, which a label holds as one text."""
        out = tmp_path / "results"
        hack = "kv_residency=hack,kv_residency_options=bits=4+partition=64"
        arguments = f"--model bundled --shapes 1x512 --systems cache-step:layers_per_group=1,{hack}"
        options = ["--sparse-budget", "32", "--window", "4", "--out", str(out)]
        assert main([*arguments.split(), *options]) == 0
        (measured,) = report.read_results(out / "results.json").measurements
        assert measured.failure == ""
        assert measured.tpot_ms is not None
        assert measured.wire is not None
        assert 0 < measured.started < measured.ended


@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3.1-8b"])
def test_a_blank_calibration_is_of_the_model_and_corrects_no_projection(
    model: str, tmp_path: Path
) -> None:
    config, engine = model_config(model), {"score_keys": "sketch", "dense_layers": 3}
    write_blank(tmp_path, config, engine)
    card, corrections, bases = read(tmp_path)
    layers = config["num_hidden_layers"]
    assert card.architecture == config["architectures"][0]
    told = sources(layers, 3, 2, 2)
    assert [*corrections] == [*told]
    assert [*bases] == [*range(3, layers)]
    projection = torch.rand(card.hidden_size + 1, card.query_heads * card.head_dim)
    for layer, correction in corrections.items():
        # What only the token before tells starts from nothing, and zeros would be one long tie.
        assert torch.equal(correction.added_to(projection), projection) != told[layer].is_before


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ("", False),
        ("score_keys=sketch", True),
        ("score_keys=sketch,calibration=mine", False),
    ],
)
def test_a_calibration_is_made_where_none_is_named_and_one_is_needed(
    changes: str, needed: bool
) -> None:
    assert needs_calibration(job_of(f"cache-rank:{changes}").engine) == needed
