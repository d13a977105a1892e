"""The parts of evaluate that need no server."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.accuracy.evaluation import make_jobs, server_flags
from scripts.accuracy.presets import PRESETS
from scripts.evaluate import main, parse_options


def test_a_preset_is_the_default() -> None:
    options = parse_options(["--out", "out", "--gpus"])
    assert options.systems == list(PRESETS["budgets"].systems)
    assert options.budgets == [16, 32, 64]
    # Dense decoding has no budget: one server. Each other system has one for every budget, or one
    # for the budget that its label names.
    named = [label for label in options.systems if "sparse_budget" in label]
    assert len(make_jobs(options)) == 1 + 5 * 3 + len(named)


def test_another_task_has_its_own_dials() -> None:
    options = parse_options(["--out", "out", "--task", "addition", "--gpus"])
    assert options.dials == [{}]
    (job, *_) = make_jobs(options)
    assert job.longest == (4 * 64 + 3) + (5 * 64 - 1) + 1


def test_a_server_has_room_for_its_problems() -> None:
    arguments = "--out out --chains 4 --systems cache-rank --budgets 16 --gpus 0 1 --model M"
    options = parse_options([*arguments.split(), "--base-url", "http://x"])
    (job,) = make_jobs(options)
    flags = server_flags(job, options)
    assert flags[flags.index("--cuda-graph-bs-decode") + 1 :][:3] == ["1", "2", "4"]
    assert flags[flags.index("--max-running-requests") + 1] == "5"  # one counts twice in chunks
    assert flags[flags.index("--model-path") + 1] == "M"  # whose task is not known
    # 128 facts, `go`, the start key and <bos>.
    assert flags[flags.index("--sparse-threshold") + 1] == "259"


def test_a_trained_model_has_its_task(tmp_path: Path) -> None:
    folder = tmp_path / "self-written-1024"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    options = parse_options(["--out", "out", "--gpus", "--model", str(folder)])
    assert (options.task, options.dials) == ("self-written", [{"keys": 1024, "hops": 1000}])
    named = [*("--task", "pointer-chase"), *("--dials", "facts=9,hops=9")]
    options = parse_options(["--out", "out", "--gpus", "--model", str(folder), *named])
    assert (options.task, options.dials) == ("pointer-chase", [{"facts": 9, "hops": 9}])


def test_a_self_written_table_is_written_densely() -> None:
    options = parse_options("--out out --task self-written --dials hops=9,keys=32 --gpus".split())
    assert make_jobs(options)[0].threshold == 1 + 2 * 32 + 1


@pytest.mark.parametrize(
    "arguments",
    [
        "--chains 1",
        "--base-url http://x --systems quest --budgets 1 2",
        "--model /nowhere",
        "--dials facts",
    ],
)
def test_wrong_options_are_refused(arguments: str) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--out", "out", *arguments.split()])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--dials facts", "--dials: 'facts': write ARGUMENT=VALUE"),
        ("--set facts", "--set: 'facts': write ARGUMENT=VALUE"),
        ("--server-flags '", "--server-flags: No closing quotation"),
    ],
)
def test_wrong_options_are_explained(
    arguments: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--out", "out", *arguments.split()])
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--dials hops=9", "--dials facts=9,hopes=9", "--systems no"])
def test_wrong_problems_are_refused(arguments: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error"):
        main(["--out", str(tmp_path), *arguments.split()])
    assert not (tmp_path / "run.json").exists()


def test_there_must_be_something_to_render(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing to render"):
        main(["--out", str(tmp_path), "--render"])
